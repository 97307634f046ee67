"""Meter: what a training took of the machine: memory, and energy where the machine tells."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")


class Meter:
    """Begins to count when it is made."""

    def __init__(self, powercap: Path = POWERCAP):
        """`powercap` is where Linux keeps the counters of energy (RAPL)."""
        self._begun, self._powercap = time.perf_counter(), powercap
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

    def report(self) -> dict[str, Any]:
        """Keys: wall_seconds, cpu_seconds, peak_memory_bytes, energy_joules (None: the machine does not tell)."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        now = self._joules()
        energy = sum((now[name][0] - before) % most for name, (before, most) in self._energy.items() if name in now)
        return {
            "wall_seconds": time.perf_counter() - self._begun,
            "cpu_seconds": used.ru_utime + used.ru_stime,
            "peak_memory_bytes": used.ru_maxrss * 1024,
            "energy_joules": energy if self._energy else None,
        }
