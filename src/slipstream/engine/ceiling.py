"""The ceiling of a loaded model on this machine: its own packed bytes, read and nothing else."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from slipstream.engine.model import Model
from slipstream.kernels.native import NativeExecutable


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Tokens a second at batch one if nothing but reading the weights took time."""

    bytes_per_token: int
    read_gb_s: float
    isa: str
    threads: int

    @property
    def tok_s(self) -> float:
        """Bandwidth over bytes per token."""
        return self.read_gb_s * 1e9 / self.bytes_per_token


def measure_ceiling(model: Model, reads: int = 5) -> Ceiling | None:
    """Median of a few reads; None for a backend that has no packed weights."""
    executable = model.executable
    if not isinstance(executable, NativeExecutable):
        return None
    seconds = statistics.median(executable.read_weights() for _ in range(reads))
    rate = executable.weight_bytes / seconds / 1e9
    return Ceiling(executable.bytes_per_token, rate, executable.isa, executable.threads)
