"""Open a model on disk, whatever kind it is."""

from __future__ import annotations

from pathlib import Path

from slipstream.errors import ModelFileError
from slipstream.weights.gguf import read_gguf
from slipstream.weights.safetensors import read_safetensors
from slipstream.weights.store import Checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file, or a folder with config.json and safetensors. Raises ModelFileError."""
    if path.is_dir():
        if (path / "config.json").exists():
            return read_safetensors(path)
        candidates = sorted(path.glob("*.gguf"))
        if len(candidates) == 1 or (candidates and "-00001-of-" in candidates[0].name):
            return read_gguf(candidates[0])
        raise ModelFileError(path, "folder", "has neither a config.json nor exactly one GGUF model")
    if not path.exists():
        raise ModelFileError(path, "file", "does not exist")
    return read_gguf(path)
