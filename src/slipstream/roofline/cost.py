"""The cost model: seconds(StepShape), fitted on this machine and kept true by the steps that are run.

A step is three parts that are measured apart: the body (every matrix but the head, by rows), the head and the
sampling (by logit rows), attention (by rows, rows × context, and bytes of cache), plus what the host adds. Body and
head are piecewise linear between knots, so that tiles and the knee show as they are.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from slipstream.program import StepShape

Float64Array = npt.NDArray[np.float64]

LEARNING = 0.015
"""Share of a surprise that a knot takes over from one step."""
DRAFTED_HOST = 3e-4
"""Seconds that the host adds to a step with drafts, until some were seen."""
PACING = 0.03
"""Share of a surprise that is put down to the whole machine, whose speed drifts."""
MOST_EXTRA = 1e-3
"""Seconds by which a step's host time may exceed what is expected and still be learned from."""
MOST_SURPRISE = 0.4
"""Logarithm at which a step's surprise is cut off: one disturbed step moves little."""
LEAST = 1e-9


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds at rising counts, linear in between and past the last; no rows cost nothing."""

    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, count: float) -> float:
        """Seconds of `count` rows."""
        if count <= 0:
            return 0.0
        counts, seconds = self.counts, self.seconds
        if count <= counts[0]:
            return seconds[0]
        i = min(bisect_right(counts, count), len(counts) - 1)
        low, high = counts[i - 1], counts[i]
        return seconds[i - 1] + (seconds[i] - seconds[i - 1]) * (count - low) / (high - low)

    def slope(self, count: float) -> float:
        """Seconds that one more row costs."""
        return self.at(count + 1) - self.at(count)

    def moved(self, count: float, surprise: float) -> Curve:
        """The curve after a step whose seconds were exp(surprise) of the predicted ones; never falling."""
        cut = max(-MOST_SURPRISE, min(MOST_SURPRISE, surprise))
        i = min(max(bisect_right(self.counts, count), 1), len(self.counts) - 1)
        low, high = self.counts[i - 1], self.counts[i]
        share = min(max((count - low) / (high - low), 0.0), 1.0)
        seconds = list(self.seconds)
        seconds[i - 1] *= math.exp(LEARNING * cut * (1 - share))
        seconds[i] *= math.exp(LEARNING * cut * share)
        return Curve(self.counts, tuple(accumulate(seconds, max)))


@dataclass(frozen=True)
class CostModel:
    """An immutable snapshot. `attention` are seconds of a step, a row, a row × token of context, a byte of cache.

    `pace` is how much slower the machine is now than when the rest was fitted, `copy` seconds of copying a byte of
    the cache from one block to another, `drafted` what the host adds to a step that verifies drafts.
    """

    body: Curve
    head: Curve
    attention: tuple[float, float, float, float]
    host: float = 0.0
    pace: float = 1.0
    copy: float = 0.0
    drafted: float = DRAFTED_HOST

    @cached_property
    def _extras(self) -> dict[tuple[int, int], list[float]]:
        """What more rows were said to add, by the rows without them: many ask, for the same few."""
        return {}

    def seconds(self, shape: StepShape) -> float:
        """Predicted seconds of a step."""
        kernels = self.body.at(shape.rows) + self.head.at(shape.logit_rows) + self._attention(shape)
        return self.pace * kernels + self.host

    def extra_rows(self, shape: StepShape, context: int) -> Callable[[int], float]:
        """Seconds that n more rows with logits at some context add to a step, as a function of n.

        The same as two calls of `seconds`, for those who ask many times.
        """
        rows, logit_rows, pace = shape.rows, shape.logit_rows, self.pace
        each = self.attention[1] + self.attention[2] * context
        known = self._extras.setdefault((rows, logit_rows), [])

        def extra(more: int) -> float:
            while more >= len(known):
                count = len(known)
                kernels = self.body.at(rows + count) + self.head.at(logit_rows + count)
                known.append(kernels - self.body.at(rows) - self.head.at(logit_rows))
            return pace * (known[more] + more * each)

        return extra

    def attention_seconds(self, shape: StepShape) -> float:
        """The part that reads the cache."""
        return self.pace * self._attention(shape)

    def _attention(self, shape: StepShape) -> float:
        fixed, row, pair, byte = self.attention
        return fixed + row * shape.rows + pair * shape.row_context + byte * shape.kv_bytes

    def marginal_row(self, rows: int) -> float:
        """Seconds of one more row in a step of `rows`, context left out."""
        return self.pace * (self.body.slope(rows) + self.attention[1])

    def marginal_logit_row(self, logit_rows: int) -> float:
        """Seconds of one more row with logits."""
        return self.pace * self.head.slope(logit_rows)

    def marginal_kv_token(self, bytes_per_token: float) -> float:
        """Seconds of one more token of context for a decoding row."""
        return self.pace * (self.attention[2] + self.attention[3] * bytes_per_token)

    @property
    def knee(self) -> int | None:
        """The rows from which on one more always costs half of a row's share at large batch; None: not in sight."""
        counts, seconds = self.body.counts, self.body.seconds
        for i in range(len(counts) - 1, 0, -1):
            slope = (seconds[i] - seconds[i - 1]) / (counts[i] - counts[i - 1])
            if slope < self.large_batch_share / 2:
                return counts[i] if i < len(counts) - 1 else None
        return counts[0]

    @property
    def large_batch_share(self) -> float:
        """Seconds of the body per row at the largest batch that was measured."""
        return self.body.seconds[-1] / self.body.counts[-1]


@dataclass(frozen=True, slots=True)
class Observation:
    """A step as it was: its shape and the seconds of its parts."""

    shape: StepShape
    body: float
    head: float
    attention: float
    host: float
    drafted: bool = False
    """Whether it verified drafts."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.body + self.head + self.attention + self.host


def fit(observations: Sequence[Observation], copy: float = 0.0) -> CostModel:
    """The model of some probing steps; counts that were probed become knots.

    Lower quartiles: whatever disturbs a step makes it longer.
    """
    if not observations:
        raise ValueError("a cost model needs steps to be fitted to")
    body = _curve([(o.shape.rows, o.body) for o in observations])
    head = _curve([(o.shape.logit_rows, o.head) for o in observations if o.shape.logit_rows])
    host = float(np.median([o.host for o in observations]))
    return CostModel(body, head, _attention(observations), host, copy=copy)


def _curve(points: Sequence[tuple[int, float]]) -> Curve:
    by_count: dict[int, list[float]] = {}
    for count, seconds in points:
        by_count.setdefault(count, []).append(seconds)
    counts = sorted(by_count) or [1]
    typical = np.maximum.accumulate([float(np.quantile(by_count.get(count, [0.0]), 0.25)) for count in counts])
    if len(counts) == 1:
        return Curve((counts[0], counts[0] + 1), (float(typical[0]),) * 2)
    return Curve(tuple(counts), tuple(typical.tolist()))


def _attention(observations: Sequence[Observation]) -> tuple[float, float, float, float]:
    """Least squares of relative errors with no negative coefficient, by dropping the worst one at a time."""
    features = np.array([[1.0, o.shape.rows, o.shape.row_context, o.shape.kv_bytes] for o in observations])
    seconds = np.array([max(o.attention, LEAST) for o in observations])
    weighted, target = features / seconds[:, None], np.ones(len(seconds))
    active = [0, 1, 2, 3]
    while active:
        scale = np.abs(weighted[:, active]).max(0)
        solution = np.linalg.lstsq(weighted[:, active] / scale, target, rcond=None)[0] / scale
        if (solution >= 0).all():
            break
        active.pop(int(solution.argmin()))
    coefficients = np.zeros(4)
    if active:
        coefficients[active] = solution
    fixed, row, pair, byte = coefficients.tolist()
    return fixed, row, pair, byte


class OnlineCost:
    """Follows the steps that are run; hands out snapshots. A step's surprise is cut off, and moves little.

    What all steps have in common moves the pace, what is left of a surprise the knots near the step's shape.
    """

    def __init__(self, model: CostModel):
        self.model = model

    def observe(self, step: Observation) -> None:
        """Learn from a step."""
        shape, model = step.shape, self.model
        kernels = step.body + step.head + step.attention
        surprise = _cut(_surprise(kernels, model.seconds(shape) - model.host))
        pace = model.pace * math.exp(PACING * surprise)
        body = model.body.moved(shape.rows, _surprise(step.body / pace, model.body.at(shape.rows)))
        head = model.head
        if shape.logit_rows:
            head = head.moved(shape.logit_rows, _surprise(step.head / pace, head.at(shape.logit_rows)))
        expected = model.attention_seconds(shape) / model.pace
        factor = math.exp(LEARNING * _cut(_surprise(step.attention / pace, expected)))
        fixed, row, pair, byte = (value * factor for value in model.attention)
        host, drafted = model.host, model.drafted
        if step.drafted:
            drafted = max(0.0, drafted + LEARNING * max(-host, min(step.host - host - drafted, MOST_EXTRA)))
        else:
            host *= math.exp(LEARNING * _cut(_surprise(step.host, host)))
        self.model = CostModel(body, head, (fixed, row, pair, byte), host, pace, model.copy, drafted)


def _cut(surprise: float) -> float:
    return max(-MOST_SURPRISE, min(MOST_SURPRISE, surprise))


def _surprise(seen: float, predicted: float) -> float:
    return math.log(max(seen, LEAST) / max(predicted, LEAST))
