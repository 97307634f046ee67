"""Hardware: what a machine can read, multiply and hold; the catalogue of known machines, and the user's own.

`catalogue.json` beside this file names the source of every figure. A file of the same form at
`hardware_file()` adds machines or replaces them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import SlipstreamError, UsageError
from slipstream.paths import config_folder

Arithmetic = Literal["f32", "bf16", "fp8", "fp4", "int8"]
ARITHMETICS: tuple[Arithmetic, ...] = ("f32", "bf16", "fp8", "fp4", "int8")


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device. Bytes, bytes a second, operations a second (a multiply and an add are two), seconds.

    `peak` is dense arithmetic by kind; a kind that is missing is done in the next wider one. Figures that
    nobody publishes are 0 and left out of account. `step_overhead` is what a step takes besides reading and
    arithmetic, if it was measured.
    """

    name: str
    bandwidth: float
    memory: float = 0.0
    peak: Mapping[str, float] = field(default_factory=dict)
    link_bandwidth: float = 0.0
    link_latency: float = 0.0
    step_overhead: float = 0.0
    kind: str = ""
    source: str = ""
    note: str = ""

    def operations(self, arithmetic: Arithmetic) -> float:
        """Peak operations a second in `arithmetic`, or in the nearest kind that can stand in for it; 0: unknown."""
        stand_ins: dict[Arithmetic, tuple[Arithmetic, ...]] = {
            "fp4": ("fp4", "fp8", "bf16", "f32"),
            "fp8": ("fp8", "bf16", "f32"),
            "int8": ("int8", "bf16", "f32"),
            "bf16": ("bf16", "f32"),
            "f32": ("f32",),
        }
        return next((self.peak[kind] for kind in stand_ins[arithmetic] if self.peak.get(kind)), 0.0)

    def ops_per_byte(self, arithmetic: Arithmetic) -> float:
        """Operations that fit into the time of reading one byte; 0: unknown."""
        return self.operations(arithmetic) / self.bandwidth


def hardware_file() -> Path:
    """Where a user writes machines of his own."""
    return config_folder() / "hardware.json"


@cache
def _built_in() -> dict[str, Hardware]:
    text = files("slipstream.roofline").joinpath("catalogue.json").read_text(encoding="utf-8")
    return _parse(json.loads(text), "catalogue.json")


def catalogue() -> dict[str, Hardware]:
    """All known machines by name, the user's own last and first in effect. Raises SlipstreamError."""
    path = hardware_file()
    if not path.exists():
        return dict(_built_in())
    try:
        own = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SlipstreamError(f"{path}: cannot be read as JSON ({error})") from error
    return _built_in() | _parse(own, str(path))


def add_hardware(name: str, entry: Mapping[str, Any]) -> None:
    """Write a machine into the user's file, in place of one of that name. Raises SlipstreamError."""
    path = hardware_file()
    _machine(_plain(name), dict(entry), "the new entry")
    catalogue()  # a file that cannot be read is not written over
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(known | {_plain(name): dict(entry)}, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise SlipstreamError(f"{path}: {error}") from error


def find_hardware(name: str) -> Hardware:
    """A machine of the catalogue; case, spaces and underscores do not matter. Raises UsageError."""
    known = catalogue()
    wanted = _plain(name)
    if wanted in known:
        return known[wanted]
    near = [entry for entry in known if wanted and wanted in entry]
    if len(near) == 1:
        return known[near[0]]
    hint = f"did you mean one of {', '.join(near)}?" if near else f"known: {', '.join(known)}"
    raise UsageError(f"no hardware {name!r}; {hint} Add your own in {hardware_file()}")


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "-").replace("_", "-")


def _parse(entries: Any, where: str) -> dict[str, Hardware]:
    if not isinstance(entries, dict):
        raise SlipstreamError(f"{where}: is not an object of machines by name")
    return {_plain(name): _machine(_plain(name), entry, where) for name, entry in entries.items()}


def _machine(name: str, entry: Any, where: str) -> Hardware:
    def number(key: str, value: Any, least: float = 0.0) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e12:
            raise SlipstreamError(f"{where}: {name}: {key} is {value!r}, expected a number of at least {least:g}")
        return float(value)

    if not isinstance(entry, dict) or "bandwidth_gb_s" not in entry:
        raise SlipstreamError(f"{where}: {name}: needs at least bandwidth_gb_s")
    tops = entry.get("tops", {})
    if not isinstance(tops, dict) or not set(tops) <= set(ARITHMETICS):
        raise SlipstreamError(f"{where}: {name}: tops takes {', '.join(ARITHMETICS)}")
    return Hardware(
        name,
        number("bandwidth_gb_s", entry["bandwidth_gb_s"], 1e-3) * 1e9,
        number("memory_gb", entry.get("memory_gb", 0)) * 1e9,
        {kind: number(f"tops.{kind}", value) * 1e12 for kind, value in tops.items()},
        number("link_gb_s", entry.get("link_gb_s", 0)) * 1e9,
        number("link_us", entry.get("link_us", 0)) * 1e-6,
        number("step_overhead_us", entry.get("step_overhead_us", 0)) * 1e-6,
        str(entry.get("kind", "")),
        str(entry.get("source", "")),
        str(entry.get("note", "")),
    )
