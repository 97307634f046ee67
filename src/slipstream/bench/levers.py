"""Levers that exist here, switched on one at a time beside the plain model, in turns: predicted against measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from slipstream.bench.machine import native_only
from slipstream.engine import LoadOptions, Model, load_model
from slipstream.engine.cost import commit, decode_step, fit_cost
from slipstream.kernels.native.instruments import NativeInstruments
from slipstream.program import KVFormat, Rows, StepShape
from slipstream.program.sampling import Draw, DrawColumns, SamplingParams
from slipstream.roofline import Setting, ceiling, find_precision
from slipstream.roofline.probe import this_machine

TURNS, STEPS = 7, 4
BATCHES = (2, 4, 8, 16)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Verified:
    """A lever's factor on tokens a second of all users together: by the roofline, by the cost model (where there is
    one for it), and measured as the median over turns, with its least and greatest.
    """

    name: str
    predicted: float
    fitted: float | None
    measured: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class _Variant:
    name: str
    model: Model
    rows: Rows
    predicted: float
    fitted: float | None = None

    def tok_s(self) -> float:
        """Tokens a second of all rows together: median over a few steps."""
        executable = native_only(self.model.executable)
        count = len(self.rows)
        draws = DrawColumns.of([Draw(SamplingParams(temperature=0.7), i, 0, 1) for i in range(count)])
        seconds = []
        for _ in range(STEPS):
            begun = time.perf_counter()
            executable.step(self.rows, draws)
            seconds.append(time.perf_counter() - begun)
        return count / statistics.median(seconds)


def _variants(reference: str, setting: Setting, progress: Progress) -> list[_Variant]:
    batch, context = setting.batch, setting.context
    options = LoadOptions(max_len=context + 2, sequences=max(batch, *BATCHES), max_rows=64)
    base = load_model(reference, options, progress)
    executable = native_only(base.executable)
    cost = fit_cost(base, lambda i, n: progress("fitting the cost model", i, n))
    before = ceiling(setting).total_tok_s

    def predicted(changed: Setting) -> float:
        return ceiling(changed).total_tok_s / before

    def fitted(count: int) -> float:
        wide, one = (cost.seconds(StepShape.of(decode_step(base, n, context), base.cache)) for n in (count, batch))
        return count / wide / (batch / one)

    rows = decode_step(base, batch, context)
    found = [_Variant("", base, rows, 1.0)]
    for count in BATCHES:
        if count > batch:
            wide = replace(setting, batch=count)
            found.append(
                _Variant(f"batch {count}", base, decode_step(base, count, context), predicted(wide), fitted(count))
            )
    if setting.kv_bits > 8:
        small = load_model(reference, replace(options, kv_format=KVFormat.INT8), progress)
        found.append(_Variant("8-bit keys and values", small, rows, predicted(replace(setting, kv_bits=8.0))))
    if executable.threads > 1:
        read = this_machine(NativeInstruments()).read
        fewer = replace(base, executable=executable.with_threads(executable.threads - 1))
        if executable.threads - 1 in read and executable.threads in read:
            slower = read[executable.threads - 1].median / read[executable.threads].median
            found.append(_Variant("one thread less", fewer, rows, slower))
    if any(packing.format in ("f32", "f16", "bf16") for packing in executable.packings):
        for name in ("int8", "int4"):
            less = load_model(reference, replace(options, quantization=name), progress)
            changed = replace(setting, precision=find_precision(name))
            found.append(_Variant(f"{name} weights", less, rows, predicted(changed)))
    return found


def verify(reference: str, setting: Setting, progress: Progress) -> list[Verified]:
    """Measure the levers that exist for a model. Raises SlipstreamError if it cannot be loaded."""
    variants = _variants(reference, setting, progress)
    for variant in variants:
        commit(variant.model, [variant.rows])
    rates: list[list[float]] = [[] for _ in variants]
    for turn in range(TURNS + 1):
        for variant, into in zip(variants, rates, strict=True):
            rate = variant.tok_s()
            if turn:  # the first one warms up
                into.append(rate)
        progress("measuring", turn, TURNS)
    base = rates[0]
    results = []
    for variant, mine in zip(variants[1:], rates[1:], strict=True):
        ratios = [a / b for a, b in zip(mine, base, strict=True)]
        results.append(
            Verified(
                variant.name, variant.predicted, variant.fitted, statistics.median(ratios), min(ratios), max(ratios)
            )
        )
    return results
