"""NativeInstruments: what the probe measures with, on the native kernels."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.kernels.native import _native

MEETINGS = 20_000


class NativeInstruments:
    """Reads, arithmetic and barriers of the native backend (roofline.probe.Instruments)."""

    @property
    def isas(self) -> Sequence[str]:
        """Names of the instruction sets that run here, best first."""
        return _native.available_isas()

    @property
    def cores(self) -> int:
        """Cores this process may use."""
        return _native.usable_cores()

    def read_rate(self, threads: int, nbytes: int, seconds: float, *, huge_pages: bool) -> float:
        """Bytes a second of reading `nbytes` per thread over and over."""
        return _native.read_rate(threads, nbytes, seconds, huge_pages)

    def peak(self, isa: str, arithmetic: str, threads: int, seconds: float) -> float:
        """Operations a second in registers, with the kernels of `isa`."""
        in_use = _native.isa()
        _native.select_isa(isa)
        try:
            return _native.peak_ops(arithmetic, threads, seconds)
        finally:
            _native.select_isa(in_use)

    def barrier(self, threads: int) -> float:
        """Seconds that threads need to meet once."""
        return _native.barrier_seconds(threads, MEETINGS)
