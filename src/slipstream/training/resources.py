"""Resources: what a training takes of the machine: memory, kept small, disk, and energy where the machine tells."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import time
from pathlib import Path
from typing import Any

LARGE = 4 << 20
"""Bytes from which on a piece of memory goes back to the system when it is no longer used."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's names for its parameters."""
POWERCAP = Path("/sys/class/powercap")


def keep_memory_small() -> None:
    """Have the C library give large pieces back at once.

    Batches differ in shape, so that pieces of one do not fit those of the next; kept for later, as glibc would, they
    took half of a training's memory.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system, another C library
        library = ctypes.CDLL("libc.so.6")
        library.mallopt(_MMAP_THRESHOLD, LARGE)
        library.mallopt(_TRIM_THRESHOLD, LARGE)


class Meter:
    """Begins to count when it is made, or with what a process before it had come to when it was stopped."""

    def __init__(self, powercap: Path = POWERCAP):
        """`powercap` is where Linux keeps the counters of energy (RAPL)."""
        self._begun, self._powercap = time.perf_counter(), powercap
        self._before: dict[str, Any] = {}
        self._disk = 0
        self._energy = self._joules()

    def _joules(self) -> dict[str, tuple[float, float]]:
        """(joules, where the counter begins anew) of each package; empty where the machine does not tell."""
        found = {}
        for zone in sorted(self._powercap.glob("intel-rapl:[0-9]*")):
            if zone.name.count(":") > 1:
                continue
            try:
                used = float((zone / "energy_uj").read_text())
                most = float((zone / "max_energy_range_uj").read_text())
            except (OSError, ValueError):
                continue
            found[zone.name] = (used * 1e-6, most * 1e-6)
        return found

    def go_on_from(self, before: dict[str, Any]) -> None:
        """Count what a process had come to (its `report`) that was stopped and is gone on with."""
        self._before = before

    def look_at(self, folder: Path) -> None:
        """Count what is in a folder now; the most that it ever held counts."""
        self._disk = max(self._disk, sum(file.stat().st_size for file in folder.iterdir() if file.is_file()))

    def report(self) -> dict[str, Any]:
        """Keys: wall_seconds, cpu_seconds, peak_memory_bytes, peak_disk_bytes (of the folders looked at), energy_joules
        (None: the machine does not tell).
        """
        used = resource.getrusage(resource.RUSAGE_SELF)
        now = self._joules()
        energy = sum((now[name][0] - before) % most for name, (before, most) in self._energy.items() if name in now)
        before = self._before
        known = self._energy and before.get("energy_joules", 0.0) is not None
        return {
            "wall_seconds": time.perf_counter() - self._begun + before.get("wall_seconds", 0.0),
            "cpu_seconds": used.ru_utime + used.ru_stime + before.get("cpu_seconds", 0.0),
            "peak_memory_bytes": max(used.ru_maxrss * 1024, before.get("peak_memory_bytes", 0)),
            "peak_disk_bytes": max(self._disk, before.get("peak_disk_bytes", 0)),
            "energy_joules": energy + before.get("energy_joules", 0.0) if known else None,
        }
