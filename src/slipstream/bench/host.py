"""What a step costs outside its kernels: planning, the way in and out, tokens to text; in turn and planned ahead.

And what becomes of steps when another process keeps a core busy.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from slipstream.bench.machine import native_only
from slipstream.engine import Engine, Model
from slipstream.engine.cost import cost_model
from slipstream.errors import UsageError
from slipstream.kernels.native import usable_cores
from slipstream.program.sampling import SamplingParams
from slipstream.roofline.accounting import Totals

Progress = Callable[[int, int], None]
PROMPT, STEPS, WARM_UP = 64, 160, 16
BUSY_SECONDS = 1.5
PARTS = ("scheduling", "dispatch", "output", "outside", "accounting", "hidden", "stolen")


def measure(model: Model, sequences: Sequence[int], turns: int = 5, progress: Progress | None = None) -> dict[str, Any]:
    """Keys: busy (see below), host: by sequences, then mode: µs a step by part, `outside_kernels`, and tokens a second.

    Mode `after` plans a step when the one before has ended, with the model's threads; `ahead` plans it while that one
    runs, with a thread fewer where all cores would run kernels.
    """
    executable = native_only(model.executable)
    spare = executable.threads if executable.threads < usable_cores() else max(1, executable.threads - 1)
    fewer = replace(model, executable=executable.with_threads(spare))
    modes = {"after": (model, False), "ahead": (fewer, True)}
    result: dict[str, Any] = {}
    for done, count in enumerate(sequences):
        result[str(count)] = {}
        for index, (mode, (used, ahead)) in enumerate(modes.items()):
            if progress:
                progress(done * len(modes) + index, len(sequences) * len(modes))
            result[str(count)][mode] = _steps(used, count, ahead)
    threads = {"after": executable.threads, "ahead": spare}
    return {"model": model.reference, "threads": threads, "host": result, "busy": _beside_busy(model, turns)}


def _beside_busy(model: Model, turns: int) -> dict[str, Any]:
    """Tokens a second of one sequence, medians over turns: `alone`; beside a process that keeps a core busy, with the
    threads that are best then (`adapting`), and with all of them (`all_threads`).
    """
    executor = native_only(model.executable).executor
    rates: dict[str, list[float]] = {"alone": [], "adapting": [], "all_threads": []}
    for _ in range(turns):
        rates["alone"].append(_rate(model))
        with _busy_process():
            rates["adapting"].append(_rate(model))
            executor.crowd(executor.threads)
            try:
                rates["all_threads"].append(_rate(model))
            finally:
                executor.crowd(0)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return medians | {"turns": rates}


@contextmanager
def _busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _rate(model: Model) -> float:
    """Tokens a second of one sequence, for some seconds after its first token."""
    engine = Engine(model, cost_model(model), prefix_cache=False, ahead=False)
    tokens, begun, now = 0, 0.0, 0.0
    while now - begun < BUSY_SECONDS:
        # a new one whenever one has ended: the context stays short
        if not engine.busy:
            engine.add(list(range(PROMPT)), SamplingParams(temperature=0.7, max_tokens=STEPS, ignore_eos=True))
        for chunk in engine.step():
            tokens += len(chunk.token_ids) if begun else 0
            begun = begun or time.perf_counter()
        now = time.perf_counter()
    return tokens / (now - begun)


def _steps(model: Model, count: int, ahead: bool) -> dict[str, float]:
    """Microseconds a step while `count` sequences decode."""
    if count > model.max_rows or count * -(-(PROMPT + STEPS + WARM_UP) // 32) > model.blocks:
        raise UsageError(f"{count} sequences need a larger cache or more rows a step")
    rng = random.Random(0)
    engine = Engine(model, cost_model(model), prefix_cache=False, ahead=ahead)
    params = SamplingParams(temperature=0.7, max_tokens=PROMPT + STEPS, ignore_eos=True)
    for seed in range(count):
        prompt = [rng.randrange(min(200, model.config.vocabulary)) for _ in range(PROMPT)]
        engine.add(prompt, replace(params, seed=seed))
    while any(sequence.generated < WARM_UP for sequence in engine.sequences):
        engine.step()
    before = _sums(engine.accounting.totals)
    at = engine.accounting.records[-1]
    for _ in range(STEPS):
        engine.step()
    after, end = _sums(engine.accounting.totals), engine.accounting.records[-1]
    for number in list(engine.timings):
        engine.cancel(number)
    while engine.busy:
        engine.step()
    steps = after["steps"] - before["steps"]
    each = {part: (after[part] - before[part]) / steps * 1e6 for part in PARTS}
    seconds = (end.begun + end.kernels) - (at.begun + at.kernels)
    outside = sum(each[part] for part in ("scheduling", "dispatch", "output", "outside"))
    return each | {"outside_kernels": outside, "step": seconds / steps * 1e6, "tok_s": count * steps / seconds}


def _sums(totals: Totals) -> dict[str, float]:
    return {"steps": totals.steps, **{part: getattr(totals, part) for part in PARTS}}
