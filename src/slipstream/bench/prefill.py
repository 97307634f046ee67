"""Prefill: how fast a prompt is read, and what share of the arithmetic peak that is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from slipstream.bench.machine import native_only, spread
from slipstream.engine import Model
from slipstream.errors import UsageError
from slipstream.kernels.native import _native
from slipstream.program import BLOCK_SLOTS, Row, Rows, ops

Progress = Callable[[int, int], None]
PEAK_SECONDS = 0.05


def multiply_adds(model: Model, tokens: int) -> float:
    """Multiply-adds of the matrices and of attention for a prompt, its head for one row only."""
    total = 0.0
    for op in native_only(model.executable).program.ops:
        match op:
            case ops.Linear():
                total += tokens * op.rows_out * op.rows_in
            case ops.Logits():
                total += op.vocabulary * op.rows_in
            case ops.Attention():
                seen = sum(min(i + 1, op.window or tokens) for i in range(tokens))
                total += seen * op.heads * (op.k_dim + op.v_dim)
    return total


def prefill_chunks(model: Model, tokens: int) -> list[Rows]:
    """A prompt of `tokens` tokens in blocks 0, 1, …, as many rows a step as the model takes."""
    table = list(range(-(-tokens // BLOCK_SLOTS)))
    chunks = []
    for start in range(0, tokens, model.max_rows):
        rows = range(start, min(start + model.max_rows, tokens))
        chunks.append(
            Rows.of([Row(0, i % model.config.vocabulary, i, i, i - start - 1, i == tokens - 1) for i in rows], [table])
        )
    return chunks


def measure(model: Model, tokens: int, turns: int, progress: Progress | None = None) -> dict[str, Any]:
    """Medians over turns; an operation is a multiply or an add. Keys: tok_s, ops, peak_ops, …"""
    executable = native_only(model.executable)
    if tokens > min(model.max_len, model.blocks * BLOCK_SLOTS):
        raise UsageError(f"{tokens} tokens do not fit; raise --max-model-len")
    chunks = prefill_chunks(model, tokens)
    seconds: list[float] = []
    peaks: list[float] = []
    for turn in range(turns + 1):
        peak = _native.peak_ops("int8", executable.threads, PEAK_SECONDS)
        start_time = time.perf_counter()
        for rows in chunks:
            executable.step(rows, None)
        took = time.perf_counter() - start_time
        if turn:
            seconds.append(took)
            peaks.append(peak)
        if progress:
            progress(turn, turns)
    work = 2 * multiply_adds(model, tokens)
    rates = [tokens / s for s in seconds]
    return {
        "model": model.reference,
        "tokens": tokens,
        "turns": turns,
        "threads": executable.threads,
        "isa": executable.isa,
        "tok_s": statistics.median(rates),
        "ops": statistics.median(work / s for s in seconds),
        "peak_ops": statistics.median(peaks),
        "fraction_of_peak": statistics.median(work / s / p for s, p in zip(seconds, peaks, strict=True)),
        "spread": {"tok_s": spread(rates), "peak_ops": spread(peaks)},
    }
