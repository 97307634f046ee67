"""Where Slipstream keeps files: SLIPSTREAM_HOME, or the user's cache and data folders."""

from __future__ import annotations

import os
from pathlib import Path


def _folder(kind: str, variable: str, default: str) -> Path:
    home = os.environ.get("SLIPSTREAM_HOME")
    if home:
        return Path(home) / kind
    base = os.environ.get(variable)
    return (Path(base) if base else Path.home() / default) / "slipstream"


def cache_folder() -> Path:
    """What can be made again: packed weights, built tokenizers."""
    return _folder("cache", "XDG_CACHE_HOME", ".cache")


def models_folder() -> Path:
    """Fetched models."""
    return _folder("data", "XDG_DATA_HOME", ".local/share") / "models"


def config_folder() -> Path:
    """What the user writes himself: machines of his own."""
    return _folder("config", "XDG_CONFIG_HOME", ".config")
