"""Fitting the cost model: a few seconds of steps on the model's own executable, kept per model and machine."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from slipstream.engine.accounts import parts_of
from slipstream.engine.model import Model
from slipstream.errors import UsageError
from slipstream.kernels.backend import StepSeconds
from slipstream.kernels.native import NativeExecutable
from slipstream.paths import cache_folder
from slipstream.program import BLOCK_SLOTS, Row, Rows, StepShape
from slipstream.program.sampling import Draw, DrawColumns, SamplingParams
from slipstream.roofline.cost import CostModel, Curve, Observation, fit
from slipstream.roofline.probe import processor_name

log = logging.getLogger(__name__)

COST_VERSION = 4
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512)
MOST_DECODES = 32
"""Rows that each come from a sequence of their own; more are probed as chunks of one prompt."""
LONG_STEP = 0.25
"""Seconds of a step past which larger ones are not probed: the curve is straight by then."""
BUDGET = 3.0
"""Seconds after which no further turn over the steps begins; the first turn is always run."""
MOST_TURNS = 7
QUICK_ROWS, QUICK_BUDGET = (1, 2, 4, 8, 16), 0.15
"""Rows and seconds of a fit for one user, who waits for it: enough to say what a few more rows cost."""
COPIED = 32
"""Blocks that are copied to see how long that takes."""

Progress = Callable[[int, int], None]


def decode_step(model: Model, count: int, context: int) -> Rows:
    """`count` sequences that decode after `context` tokens. They share blocks where the cache is too small."""
    each = context // BLOCK_SLOTS + 1
    rows, tables = [], []
    for index in range(count):
        # The last block, which is written, is each one's own; the others may wrap around.
        shared = [(count + index * (each - 1) + i) % max(model.blocks - count, 1) + count for i in range(each - 1)]
        table = [block % model.blocks for block in shared] + [index]
        slot = index * BLOCK_SLOTS + context % BLOCK_SLOTS
        token = (index * 7919 + context) % model.config.vocabulary
        rows.append(Row(index, token, context, slot, -1, True))
        tables.append(table)
    return Rows.of(rows, tables)


def chunk_step(model: Model, count: int, context: int) -> Rows:
    """A chunk of `count` prompt tokens after `context` others, the last one with logits."""
    table = list(range(-(-(context + count) // BLOCK_SLOTS)))
    positions = range(context, context + count)
    rows = [Row(0, p % model.config.vocabulary, p, p, p - context - 1, p == positions[-1]) for p in positions]
    return Rows.of(rows, [table])


def observe(model: Model, rows: Rows) -> Observation:
    """Run a step and take its parts."""
    draws = DrawColumns.of([Draw(SamplingParams(temperature=0.7), i, 0, 1) for i in range(len(rows.logit_rows))])
    begun = time.perf_counter()
    seconds = model.executable.step(rows, draws).seconds
    wall = time.perf_counter() - begun
    assert seconds is not None
    body, head, attention = parts_of(StepSeconds.of(seconds).classes)
    return Observation(StepShape.of(rows, model.cache), body, head, attention, max(wall - body - head - attention, 0.0))


def probing_steps(model: Model, quick: bool = False) -> list[Rows]:
    """The steps a fit is made of, small ones first."""
    longest = model.max_len - 2
    contexts = sorted({min(c, longest) for c in (32, longest // 4, longest // 2)})
    if quick:
        chunks = [chunk_step(model, n, contexts[0]) for n in QUICK_ROWS if n <= min(model.max_rows, longest // 2)]
        return [
            *(replace(rows, logit_rows=np.arange(len(rows), dtype=np.int32)) for rows in chunks),
            decode_step(model, 1, contexts[-1]),
        ]
    counts = [n for n in ROWS if n <= model.max_rows]
    steps = []
    for count in counts:
        if count <= min(MOST_DECODES, model.blocks // 2):
            steps += [decode_step(model, count, context) for context in contexts]
        if 8 <= count < longest:
            steps += [chunk_step(model, count, context) for context in (0, contexts[-1]) if context + count <= longest]
    return steps


def commit(model: Model, steps: Sequence[Rows]) -> None:
    """Commit the cache blocks that steps read."""
    assert isinstance(model.executable, NativeExecutable)
    model.executable.touch_blocks(np.unique(np.concatenate([rows.block_tables.ravel() for rows in steps])))


def fit_cost(model: Model, progress: Progress | None = None, *, quick: bool = False) -> CostModel:
    """Probe an idle model (its cache is written over) and fit. Raises UsageError for a backend without accounts."""
    if not isinstance(model.executable, NativeExecutable):
        raise UsageError("only the native backend keeps the accounts that a cost model is fitted to")
    steps, budget = probing_steps(model, quick), QUICK_BUDGET if quick else BUDGET
    commit(model, steps)
    observe(model, steps[0])
    observations: list[Observation] = []
    too_long = model.max_rows + 1
    begun = time.perf_counter()
    shuffled = random.Random(0)
    for turn in range(MOST_TURNS):
        for rows in steps if not turn else shuffled.sample(steps, len(steps)):
            if len(rows) >= too_long or (turn and time.perf_counter() - begun > budget):
                continue
            seen = observe(model, rows)
            observations.append(seen)
            if seen.seconds > LONG_STEP:
                too_long = len(rows)
            if progress:
                progress(round(100 * min(time.perf_counter() - begun, budget)), round(100 * budget))
    copy = 0.0 if quick else _copy_seconds(model)
    model.executable.forget_blocks()  # of a large cache these are gigabytes
    return fit(observations, copy)


def _copy_seconds(model: Model) -> float:
    """Seconds of copying a byte of the cache to another block."""
    count = min(COPIED, model.blocks // 2)
    if not count:
        return 0.0
    pairs = np.array([[i, model.blocks - count + i] for i in range(count)], np.int32)
    seconds = []
    for _ in range(MOST_TURNS):
        begun = time.perf_counter()
        model.executable.copy_blocks(pairs)
        seconds.append(time.perf_counter() - begun)
    return float(np.median(seconds)) / (count * model.cache.bytes_per_block)


def _file(model: Model, quick: bool) -> Path:
    executable = model.executable
    assert isinstance(executable, NativeExecutable)
    key = (
        COST_VERSION,
        processor_name(),
        executable.threads,
        executable.numerics,
        executable.weight_bytes,
        repr(model.config),
        repr(model.cache),
        min(model.max_len, 1 << 15),
        model.max_rows,
    )
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
    return cache_folder() / "cost" / f"{name}{'-quick' if quick else ''}.json"


def cost_model(
    model: Model, progress: Progress | None = None, *, fresh: bool = False, quick: bool = False
) -> CostModel:
    """The kept cost model of this model on this machine, or a new fit, which is kept. The model must be idle.

    A `quick` fit takes a tenth of a second and says what a few rows of one user cost; a whole one is better and serves
    as well.
    """
    if not isinstance(model.executable, NativeExecutable):
        return fit_cost(model)
    path = _file(model, quick)
    for kept in (_file(model, False), path):
        if not fresh and (cost := _load(kept)) is not None:
            return cost
    cost = fit_cost(model, progress, quick=quick)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(asdict(cost)))
        temporary.replace(path)
    except OSError as error:
        log.warning("the cost model is not kept: %s", error)
    return cost


def _load(path: Path) -> CostModel | None:
    def curve(values: dict[str, Sequence[float]]) -> Curve:
        counts, seconds = values["counts"], values["seconds"]
        if len(counts) != len(seconds) or len(counts) < 2 or sorted(counts) != list(counts):
            raise ValueError("no curve")
        return Curve(tuple(int(count) for count in counts), tuple(float(value) for value in seconds))

    try:
        values = json.loads(path.read_text())
        fixed, row, pair, byte = (float(value) for value in values["attention"])
        body, head, host, copy = curve(values["body"]), curve(values["head"]), values["host"], values["copy"]
        return CostModel(body, head, (fixed, row, pair, byte), float(host), copy=float(copy))
    except (OSError, ValueError, KeyError, TypeError):
        return None
