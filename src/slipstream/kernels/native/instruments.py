"""NativeInstruments: what the probe measures with, on the native kernels."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from slipstream.kernels.native import _native
from slipstream.kernels.native.executable import native_draws
from slipstream.program import Row, Rows
from slipstream.program.sampling import Draw, DrawColumns, Drawn, SamplingParams

MEETINGS = 20_000
STEPS, WIDTH = 500, 64


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

    def empty_step(self, threads: int) -> float:
        """Seconds of a step that embeds one token, scores 64 and draws one: what every step costs besides its work."""
        executor = _native.Executor(threads, 1)
        matrix = _native.Matrix("f32", WIDTH, WIDTH, np.zeros(_native.packed_bytes("f32", WIDTH, WIDTH), np.uint8))
        executor.set_cache(np.zeros(1, np.uint8), 1, 1, 0)
        x = executor.buffer(WIDTH)
        executor.embed(x, matrix, 1.0)
        executor.logits(x, None, 0.0, matrix, None, 0.0)
        rows = Rows.of([Row(0, 0, 0, 0, -1, True)], [[0]])
        draws = DrawColumns.of([Draw(SamplingParams(temperature=0.7), 0, 0, 1)])
        out = Drawn.empty(draws)
        arguments = (rows.columns, rows.block_tables, rows.logit_rows, native_draws(draws), out.tokens, out.logprobs)
        begun = time.perf_counter()
        for _ in range(STEPS):
            executor.step_sampled(*arguments)
        return (time.perf_counter() - begun) / STEPS

    def barrier(self, threads: int) -> float:
        """Seconds that threads need to meet once."""
        return _native.barrier_seconds(threads, MEETINGS)
