"""Explaining a generation: the ceiling read in turns with its steps, then the waterfall of its answer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.engine.engine import Engine
from slipstream.engine.model import Model
from slipstream.errors import UsageError
from slipstream.kernels.backend import StepSeconds
from slipstream.kernels.native import NativeExecutable, _native
from slipstream.program.op_classes import OP_CLASSES
from slipstream.program.sampling import SamplingParams
from slipstream.roofline.accounting import StepRecord
from slipstream.roofline.counters import count_bytes
from slipstream.roofline.waterfall import Limits, Part, Waterfall, split

READ_EVERY = 8
"""Steps between two reads of the weights: memory that other tenants share changes from second to second."""
READS = 2
REPEATS = 5

Float64Array = npt.NDArray[np.float64]
Between = Callable[[Engine, int], None]


@dataclass(frozen=True, slots=True)
class Load:
    """What else the engine serves meanwhile: requests that decode, and prompts of some length, one after another."""

    others: int = 0
    foreign_prompt: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """A generation's waterfall, what its ceiling rests on, the first token's wait, and the steps after it."""

    waterfall: Waterfall
    limits: Limits
    text: str
    first_token_seconds: float
    own_prefill_seconds: float
    records: tuple[StepRecord, ...]


class _Reader:
    """Reads all weights now and then with all cores; with fewer threads, also runs the last step with all of them.

    Running a step again writes the same bits to the same places: results do not depend on threads.
    """

    def __init__(self, executable: NativeExecutable):
        self.executable = executable
        self.cores = max(_native.usable_cores(), executable.threads)
        self.twin = executable.with_threads(self.cores) if self.cores != executable.threads else None
        self.reads: list[float] = []
        self.ratios: list[Float64Array] = []
        self.seconds = 0.0

    def read(self, engine: Engine) -> None:
        engine.settle()
        begun = time.perf_counter()
        if self.twin is not None and engine.last_step is not None:
            own, all_cores = (self._repeat(e, engine) for e in (self.executable, self.twin))
            self.ratios.append(np.minimum(all_cores / np.maximum(own, 1e-9), 1.0))
        reader = self.twin or self.executable
        reader.read_weights()  # wakes its threads
        self.reads += [reader.read_weights() for _ in range(READS)]
        took = time.perf_counter() - begun
        engine.exclude(took)
        self.seconds += took

    def _repeat(self, executable: NativeExecutable, engine: Engine) -> Float64Array:
        """Seconds by class of the last step, when it is run again and again (the first time wakes the threads)."""
        assert engine.last_step is not None
        seconds = []
        for _ in range(1 + REPEATS):
            taken = executable.step(*engine.last_step).seconds
            assert taken is not None
            seconds.append(StepSeconds.of(taken).classes)
        return np.median(seconds[1:], 0)

    def limits(self) -> Limits:
        executable = self.executable
        ratios = np.median(self.ratios, 0).tolist() if self.ratios else []
        return Limits(
            statistics.median(self.reads),
            executable.bytes_per_token / executable.weight_bytes,
            float(executable.weight_bytes),
            executable.class_bytes,
            dict(zip(OP_CLASSES, ratios, strict=False)),
        )


def native_executable(model: Model) -> NativeExecutable:
    """The model's executable, if it keeps accounts. Raises UsageError."""
    if not isinstance(model.executable, NativeExecutable):
        raise UsageError("only the native backend can be explained: the others keep no accounts")
    return model.executable


def explain(
    engine: Engine,
    prompt: list[int],
    params: SamplingParams,
    load: Load | None = None,
    between: Between | None = None,
) -> Explanation:
    """Run one request beside a load and split its time. `between` is called after every step.

    The engine needs a cost model (Engine(model, cost)): it prices what other requests add. Raises UsageError if the
    answer is too short to say anything.
    """
    load = load or Load()
    model, cost = engine.model, engine.cost
    reader = _Reader(native_executable(model))
    if cost is None:
        raise UsageError("explaining needs an engine with a cost model")
    background = replace(params, ignore_eos=True, max_tokens=model.max_len, stop=(), min_tokens=0, n=1, logprobs=None)
    for index in range(load.others):
        engine.add(prompt, replace(background, seed=index))
    for _ in range(4 if load.others else 0):
        engine.step()
    reader.read(engine)
    before = engine.accounting.totals.steps
    number = engine.add(prompt, params)
    timings = engine.timings[number]
    foreign: int | None = None
    text, finished, steps = "", False, 0
    begun = paused = 0.0
    while not finished:
        if load.foreign_prompt and timings.first_token and (foreign is None or engine.timings[foreign].finished):
            foreign = engine.add([prompt[0]] * load.foreign_prompt, replace(background, max_tokens=1))
        for chunk in engine.step():
            if chunk.request == number:
                text += chunk.text
                finished |= chunk.finish_reason is not None
        ended = time.perf_counter()
        if timings.first_token and not begun:
            begun, reader.seconds = ended, 0.0
        steps += 1
        if between is not None and not finished:
            between(engine, steps)
        if steps % READ_EVERY == 0 and not finished:
            reader.read(engine)
    paused = reader.seconds
    wall = ended - begun - paused
    reader.read(engine)
    for other in list(engine.timings):
        engine.cancel(other)
    records = list(engine.accounting.records)[-(engine.accounting.totals.steps - before) :]
    first = next(i for i, r in enumerate(records) if any(s.request == number and s.tokens for s in r.spans))
    if len(records) - first < 8:
        raise UsageError("the answer ended after a few tokens; ask for a longer one (--max-tokens, --ignore-eos)")
    own_prefill = sum(r.seconds for r in records[: first + 1] if any(s.request == number for s in r.spans))
    waterfall = split(records[first + 1 :], number, wall, reader.limits(), engine.cost or cost, model.cache, OP_CLASSES)
    first_token = (timings.first_token or timings.arrived) - timings.arrived
    return Explanation(waterfall, reader.limits(), text, first_token, own_prefill, tuple(records[first + 1 :]))


COUNTED_STEPS = 20


def check_bytes(engine: Engine) -> dict[str, float | str | None]:
    """The last step's bytes by the accounts and by the hardware's counters, or why there are none."""
    executable, step = native_executable(engine.model), engine.last_step
    records = list(engine.accounting.records)
    if step is None or not records:
        return {"counted_bytes": None, "accounted_bytes": None, "reason": "no step has been run"}

    def again() -> None:
        for _ in range(COUNTED_STEPS):
            executable.step(*step)

    count = count_bytes(again)
    accounted = engine.accounting.work_of(records[-1:])[0]
    counted = count.nbytes / COUNTED_STEPS if count.nbytes is not None else None
    return {"counted_bytes": counted, "accounted_bytes": accounted, "reason": count.reason}


def explain_finished(engine: Engine, number: int) -> Waterfall | None:
    """The waterfall of a request that has ended, its ceiling read now; None if too few of its steps are remembered."""
    reader = _Reader(native_executable(engine.model))
    cost, timings = engine.cost, engine.timings[number]
    if cost is None or timings.first_token is None or timings.finished is None:
        return None
    begun, finished = timings.first_token, timings.finished
    records = list(engine.accounting.records)
    mine = [i for i, r in enumerate(records) if any(s.request == number and s.tokens for s in r.spans)]
    kept = sum(span.tokens for i in mine for span in records[i].spans if span.request == number)
    if len(mine) < 9 or kept < timings.generated:
        return None
    records = records[mine[0] + 1 : mine[-1] + 1]
    reader.read(engine)
    return split(records, number, finished - begun, reader.limits(), cost, engine.model.cache, OP_CLASSES)


RECENT_REQUESTS, LEAST_TOKENS = 4, 16


def explain_traffic(engine: Engine) -> dict[str, Any] | None:
    """The mean waterfall of the latest requests of a live engine, by their tokens; None if there was too little.

    Reads the weights a few times: the engine stands still for as long as a few steps take.
    """
    cost = engine.cost
    records = list(engine.accounting.records)
    tokens: dict[int, int] = {}
    for record in records:
        for span in record.spans:
            tokens[span.request] = tokens.get(span.request, 0) + (span.tokens if span.kind != "prefill" else 0)
    chosen = [number for number in sorted(tokens, reverse=True) if tokens[number] >= LEAST_TOKENS][:RECENT_REQUESTS]
    if cost is None or not chosen:
        return None
    reader = _Reader(native_executable(engine.model))
    reader.read(engine)
    parts: dict[str, float] = {}
    total = seconds = 0.0
    for number in chosen:
        mine = [i for i, r in enumerate(records) if any(s.request == number and s.kind != "prefill" for s in r.spans)]
        lived = records[mine[0] : mine[-1] + 1]
        wall = lived[-1].begun + lived[-1].kernels - lived[0].begun + lived[0].seconds - lived[0].kernels
        waterfall = split(lived, number, wall, reader.limits(), cost, engine.model.cache, OP_CLASSES)
        total += waterfall.tokens
        seconds += wall
        for part in waterfall.parts:
            parts[part.name] = parts.get(part.name, 0.0) + part.seconds * waterfall.tokens
    mean = Waterfall(
        seconds / total, tuple(Part(name, value / total) for name, value in parts.items()), round(total), len(records)
    )
    return mean.facts() | {"requests": len(chosen)}
