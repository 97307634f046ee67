"""Decode against the ceiling: pure reads of the model's own packed bytes between decode steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.bench.machine import native_only, spread
from slipstream.engine import Model
from slipstream.errors import UsageError
from slipstream.kernels.backend import StepSeconds
from slipstream.program import BLOCK_SLOTS, Row, Rows, StepShape
from slipstream.program.op_classes import OP_CLASSES
from slipstream.program.sampling import Draw, DrawColumns, SamplingParams

Progress = Callable[[int, int], None]
STEPS_PER_TURN = 5
READS_PER_TURN = 2


def decode_rows(count: int, position: int, blocks_each: int, vocabulary: int) -> Rows:
    """`count` sequences that all decode at `position`."""
    rows, tables = [], []
    for index in range(count):
        table = [index * blocks_each + block for block in range(blocks_each)]
        slot = table[position // BLOCK_SLOTS] * BLOCK_SLOTS + position % BLOCK_SLOTS
        token = (index * 7919 + position) % vocabulary
        rows.append(Row(index, token, position, slot, -1, True))
        tables.append(table)
    return Rows.of(rows, tables)


def measure(
    model: Model,
    rows: Sequence[int],
    context: int,
    turns: int,
    params: SamplingParams,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Medians over interleaved turns. Keys: tok_s, bytes_per_token, read_gb_s, ceiling_tok_s, …

    A turn is a few pure reads, then a few whole steps (sampling included) for each row count; the first
    turn warms up and is not counted.
    """
    executable = native_only(model.executable)
    blocks_each = context // BLOCK_SLOTS + 1
    if max(rows) * blocks_each > model.blocks or max(rows) > model.max_rows:
        raise UsageError(f"{max(rows)} rows at context {context} need a larger cache or more rows a step")
    plans = {n: decode_rows(n, context, blocks_each, model.config.vocabulary) for n in rows}
    executable.touch_blocks(np.unique(plans[max(rows)].block_tables))
    draws = {n: DrawColumns.of([Draw(params, i, 0, context + 1) for i in range(n)]) for n in rows}
    reads: list[float] = []
    steps: dict[int, list[float]] = {n: [] for n in rows}
    classes: dict[int, list[npt.NDArray[np.float64]]] = {n: [] for n in rows}
    for turn in range(turns + 1):
        if turn == 1:
            reads, steps = [], {n: [] for n in rows}
        turn_reads = [executable.read_weights() for _ in range(READS_PER_TURN)]
        for n in rows:
            times = []
            for _ in range(STEPS_PER_TURN):
                start = time.perf_counter()
                output = executable.step(plans[n], draws[n])
                times.append(time.perf_counter() - start)
                assert output.seconds is not None
                classes[n].append(StepSeconds.of(output.seconds).classes)
            steps[n].append(statistics.median(times))
        turn_reads += [executable.read_weights() for _ in range(READS_PER_TURN)]
        reads.append(statistics.median(turn_reads))
        if progress:
            progress(turn, turns)
    packed = executable.weight_bytes
    read_rates = [packed / seconds for seconds in reads]
    ceilings = [rate / executable.bytes_per_token for rate in read_rates]
    one = steps[rows[0]]
    rates = [rows[0] / seconds for seconds in one]
    fractions = [rows[0] ** -1 * rate / ceiling for rate, ceiling in zip(rates, ceilings, strict=True)]
    return {
        "model": model.reference,
        "context": context,
        "turns": turns,
        "threads": executable.threads,
        "isa": executable.isa,
        "tok_s": statistics.median(rates),
        "file_bytes_per_token": executable.stored_bytes,
        "packed_bytes_per_token": packed,
        "bytes_per_token": executable.bytes_per_token,
        "read_gb_s": statistics.median(read_rates) / 1e9,
        "ceiling_tok_s": statistics.median(ceilings),
        "fraction_of_ceiling": statistics.median(fractions),
        "step_seconds": {str(n): statistics.median(steps[n]) for n in rows},
        "step_ratio": {str(n): statistics.median(a / b for a, b in zip(steps[n], one, strict=True)) for n in rows},
        "class_seconds": {str(n): dict(zip(OP_CLASSES, np.median(classes[n], 0).tolist(), strict=False)) for n in rows},
        "class_bytes": executable.class_bytes,
        "kv_bytes": StepShape.of(plans[rows[0]], model.cache).kv_bytes // rows[0],
        "spread": {
            "tok_s": spread(rates),
            "read_gb_s": spread([rate / 1e9 for rate in read_rates]),
            "fraction_of_ceiling": spread(fractions),
        },
    }
