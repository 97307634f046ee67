"""DeviceInstruments: what the probe measures on an accelerator, or on any torch device.

Memory bandwidth by copying (a copy reads and writes every byte), peaks by large matrix products, the cost of a launch
by tiny kernels in a row, collectives by all-reduces of a token's hidden state over 2, 4, … ranks.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing

COPY_BYTES = 1 << 30
PRODUCT = 8192
TURNS, LAUNCHES, REDUCTIONS = 7, 200, 50
HIDDEN_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class DeviceProbe:
    """Of one device: bytes, bytes a second, operations a second by arithmetic, seconds of a launch and of an
    all-reduce by rank count; what is not to be had is missing.
    """

    name: str
    memory: int
    bandwidth: float
    peak: dict[str, float]
    launch: float
    collective: dict[int, float]


class DeviceInstruments:
    """Measures one torch device; sizes can be cut for tests."""

    def __init__(self, device: str = "cuda", copy_bytes: int = COPY_BYTES, product: int = PRODUCT):
        self.device = torch.device(device)
        self.copy_bytes, self.product = copy_bytes, product

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _seconds(self, work: Callable[[], object]) -> float:
        """Median over turns; the first one warms up."""
        seconds = []
        for _ in range(TURNS + 1):
            self._wait()
            begun = time.perf_counter()
            work()
            self._wait()
            seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds[1:])

    def bandwidth(self) -> float:
        """Bytes a second, read and written together."""
        source = torch.zeros(self.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * self.copy_bytes / self._seconds(lambda: target.copy_(source))

    def peak(self, arithmetic: str) -> float | None:
        """Operations a second of a square product; None if the device has no such product."""
        n = self.product
        try:
            if arithmetic == "fp8":
                a = torch.zeros(n, n, device=self.device).to(torch.float8_e4m3fn)
                one = torch.ones((), device=self.device)
                return self._rate(lambda: torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16))
            b = torch.zeros(n, n, dtype=torch.bfloat16 if arithmetic == "bf16" else torch.float32, device=self.device)
            return self._rate(lambda: b @ b)
        except (RuntimeError, NotImplementedError):
            return None

    def _rate(self, product: Callable[[], object]) -> float:
        return 2.0 * self.product**3 / self._seconds(product)

    def launch(self) -> float:
        """Seconds that one tiny kernel takes in a row of many."""
        x = torch.zeros(1, device=self.device)

        def many() -> None:
            for _ in range(LAUNCHES):
                x.add_(1)

        return self._seconds(many) / LAUNCHES

    def collective(self, ranks: int) -> float | None:
        """Seconds of an all-reduce of a token's hidden state over `ranks` devices; None if there are not so many."""
        if self.device.type == "cuda" and torch.cuda.device_count() < ranks:
            return None
        with tempfile.TemporaryDirectory() as folder:
            result = os.path.join(folder, "seconds")
            arguments = (ranks, self.device.type, os.path.join(folder, "store"), result)
            multiprocessing.spawn(_reduce, arguments, nprocs=ranks)  # type: ignore[attr-defined, no-untyped-call]
            with open(result, encoding="ascii") as file:
                return float(file.read())

    def measure(self, most_ranks: int = 8) -> DeviceProbe:
        """All of it."""
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            name, memory = properties.name, int(properties.total_memory)
        else:
            name, memory = str(self.device), 0
        peaks = {kind: self.peak(kind) for kind in ("bf16", "fp8", "f32")}
        counts = [n for n in (2, 4, 8, 16) if n <= most_ranks]
        latencies = {n: self.collective(n) for n in counts}
        return DeviceProbe(
            name,
            memory,
            self.bandwidth(),
            {kind: value for kind, value in peaks.items() if value is not None},
            self.launch(),
            {n: value for n, value in latencies.items() if value is not None},
        )


def _reduce(rank: int, ranks: int, kind: str, store: str, result: str) -> None:
    """One rank of a collective; the first writes the median down."""
    backend = "nccl" if kind == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    x = torch.zeros(HIDDEN_BYTES // 2, dtype=torch.bfloat16, device=device)
    seconds = []
    for _ in range(REDUCTIONS):
        begun = time.perf_counter()
        distributed.all_reduce(x)
        if kind == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    if rank == 0:
        with open(result, "w", encoding="ascii") as file:
            file.write(repr(statistics.median(seconds[REDUCTIONS // 2 :])))
    distributed.destroy_process_group()
