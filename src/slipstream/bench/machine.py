"""Which machine a figure was measured on, and how a result is recorded."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream import __version__
from slipstream.errors import UsageError
from slipstream.kernels.native import NativeExecutable, _native
from slipstream.roofline.probe import processor_name


def native_only(executable: object) -> NativeExecutable:
    """The executable, if it can be measured against a ceiling."""
    if not isinstance(executable, NativeExecutable):
        raise UsageError("only the native backend can be measured against its ceiling")
    return executable


def machine() -> dict[str, Any]:
    """Processor, cores in use, memory, instruction set."""
    return {
        "processor": processor_name(),
        "cores": _native.usable_cores(),
        "isa": _native.isa(),
        "isas": _native.available_isas(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def described(result: dict[str, Any]) -> dict[str, Any]:
    """A result with what is needed to repeat it."""
    return {
        "command": " ".join(["slipstream", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
        "machine": machine(),
        **result,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def save(result: dict[str, Any], path: Path) -> None:
    """Write a described result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
