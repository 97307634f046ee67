"""The probe: what this machine really reads and multiplies, in a few seconds, kept per hardware fingerprint.

The roofline room knows no backend: `Instruments` is what a backend lends it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slipstream.paths import cache_folder
from slipstream.roofline.hardware import Hardware
from slipstream.roofline.memory import usable_memory

log = logging.getLogger(__name__)

PROBE_VERSION = 2
MIB = 1 << 20
TURNS = 5
NOISY = 0.25
"""Spread over median from which a figure is called noisy."""
DEFAULT_CACHE = 32 * MIB
MOST_READ = 2 << 30
READ_SECONDS, PEAK_SECONDS = 0.06, 0.04

Progress = Callable[[int, int], None]


class Instruments(Protocol):
    """What a backend measures. Rates are per second; `threads` work at once on data of their own."""

    @property
    def isas(self) -> Sequence[str]:
        """Names of the instruction sets that run here, best first."""

    @property
    def cores(self) -> int:
        """Cores this process may use."""

    def read_rate(self, threads: int, nbytes: int, seconds: float, *, huge_pages: bool) -> float:
        """Bytes a second of reading `nbytes` per thread over and over."""

    def peak(self, isa: str, arithmetic: str, threads: int, seconds: float) -> float:
        """Operations a second in registers."""

    def barrier(self, threads: int) -> float:
        """Seconds that threads need to meet once."""

    def empty_step(self, threads: int) -> float:
        """Seconds of a step with next to no work: the engine's fixed cost."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure: median over turns, least and greatest."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """(greatest - least) / median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    @property
    def noisy(self) -> bool:
        """Whether the turns differ too much to trust the median."""
        return self.spread > NOISY


@dataclass(frozen=True, slots=True)
class Probe:
    """What was measured. `read` is by thread count, past the last-level cache; `cached` by level, all threads."""

    fingerprint: str
    processor: str
    cores: int
    memory: int
    caches: dict[str, int]
    read: dict[int, Figure]
    read_small_pages: Figure
    cached: dict[str, Figure]
    peak: dict[str, dict[str, Figure]] = field(default_factory=dict)
    barrier: Figure = field(default_factory=lambda: Figure(0, 0, 0))
    empty_step: Figure = field(default_factory=lambda: Figure(0, 0, 0))

    @property
    def noisy(self) -> list[str]:
        """Names of the figures that vary too much between turns."""
        named = [(f"read with {threads} threads", figure) for threads, figure in self.read.items()]
        named += [(f"{arithmetic} on {isa}", f) for isa, peaks in self.peak.items() for arithmetic, f in peaks.items()]
        return [name for name, figure in named if figure.noisy]

    def hardware(self) -> Hardware:
        """This machine as the ceiling sees it: all threads, the best instruction set."""
        best = next(iter(self.peak.values()), {})
        return Hardware(
            "this machine",
            self.read[max(self.read)].median,
            float(self.memory),
            {arithmetic: figure.median for arithmetic, figure in best.items()},
            step_overhead=self.empty_step.median,
            kind="cpu",
            source="measured by slipstream probe",
            note=self.processor,
        )


def processor_name() -> str:
    """The processor as the system names it, with its family and model: virtual machines often say the brand only."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    name = fields.get("model name") or platform.machine()
    if "cpu family" not in fields:
        return name
    return f"{name} (family {fields['cpu family']}, model {fields.get('model', '?')})"


def cache_sizes() -> dict[str, int]:
    """Bytes of the first processor's data caches by level, "L1" and so on; empty where the system does not say."""
    sizes: dict[str, int] = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind, level = (folder / "type").read_text().strip(), (folder / "level").read_text().strip()
            text = (folder / "size").read_text().strip()
        except OSError:
            continue
        if kind != "Instruction" and text.endswith("K"):
            sizes[f"L{level}"] = int(text[:-1]) * 1024
    return sizes


def fingerprint(instruments: Instruments) -> str:
    """Names the hardware as far as figures depend on it."""
    facts = (PROBE_VERSION, processor_name(), instruments.cores, tuple(instruments.isas), sorted(cache_sizes().items()))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def probe_file(key: str) -> Path:
    """Where a probe is kept."""
    return cache_folder() / "probe" / f"{key}.json"


def _figure(measure: Callable[[], float], turns: int = TURNS) -> Figure:
    values = [measure() for _ in range(turns)]
    return Figure(statistics.median(values), min(values), max(values))


def measure(instruments: Instruments, progress: Progress | None = None) -> Probe:
    """Measure this machine; takes seconds."""
    caches, cores, memory = cache_sizes(), instruments.cores, usable_memory()
    last = max(caches.values(), default=DEFAULT_CACHE)
    # Four times the last-level cache all in all, so that little of a pass is still there in the next one.
    past = min(max(4 * last, 256 * MIB), MOST_READ, memory // 4)
    counts = sorted({1, 2, cores // 2, cores} - {0} & set(range(1, cores + 1)) | {1, cores})
    # Half a cache, so that all of it stays there; the last level is shared by all cores.
    levels = [(name, size // 2 // (cores if size == last else 1)) for name, size in sorted(caches.items())]
    arithmetics = ("int8", "bf16", "f32")
    total, done = len(counts) + 1 + len(levels) + len(instruments.isas) * 3 + 2, 0

    def told(figure: Figure) -> Figure:
        nonlocal done
        done += 1
        if progress:
            progress(done, total)
        return figure

    def read(threads: int, nbytes: int, huge: bool = True) -> Figure:
        return told(_figure(lambda: instruments.read_rate(threads, nbytes, READ_SECONDS, huge_pages=huge)))

    rates = {threads: read(threads, past // threads) for threads in counts}
    small = read(cores, past // cores, huge=False)
    cached = {name: read(cores, size) for name, size in levels}
    peaks = {
        isa: {
            kind: told(_figure(lambda i=isa, k=kind: instruments.peak(i, k, cores, PEAK_SECONDS), 3))  # type: ignore[misc]
            for kind in arithmetics
        }
        for isa in instruments.isas
    }
    barrier = told(_figure(lambda: instruments.barrier(cores)))
    empty = told(_figure(lambda: instruments.empty_step(cores)))
    return Probe(
        fingerprint(instruments), processor_name(), cores, memory, caches, rates, small, cached, peaks, barrier, empty
    )


def save(probe: Probe) -> None:
    """Keep a probe; a disk that is full costs a warning."""
    path = probe_file(probe.fingerprint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(asdict(probe)))
        temporary.replace(path)
    except OSError as error:
        log.warning("the probe is not kept: %s", error)


def load(instruments: Instruments) -> Probe | None:
    """The kept probe of this hardware, if there is a sound one."""
    try:
        values: dict[str, Any] = json.loads(probe_file(fingerprint(instruments)).read_text())
        return Probe(
            **values
            | {
                "read": {int(threads): Figure(**figure) for threads, figure in values["read"].items()},
                "read_small_pages": Figure(**values["read_small_pages"]),
                "cached": {name: Figure(**figure) for name, figure in values["cached"].items()},
                "peak": {
                    isa: {kind: Figure(**figure) for kind, figure in peaks.items()}
                    for isa, peaks in values["peak"].items()
                },
                "barrier": Figure(**values["barrier"]),
                "empty_step": Figure(**values["empty_step"]),
            }
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def this_machine(instruments: Instruments, progress: Progress | None = None, *, fresh: bool = False) -> Probe:
    """The kept probe, or a new one, which is kept."""
    kept = None if fresh else load(instruments)
    if kept is not None:
        return kept
    probe = measure(instruments, progress)
    save(probe)
    return probe
