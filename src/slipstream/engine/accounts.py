"""The engine's side of accounting: marks around a step, and what a program reads and multiplies by class."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.engine.flight import Flight, span_records
from slipstream.engine.model import Model
from slipstream.kernels.backend import StepSeconds
from slipstream.kernels.native import NativeExecutable
from slipstream.program import Program, SpanShape, StepShape, ops
from slipstream.program.op_classes import OP_CLASSES, linear_class
from slipstream.roofline.accounting import Accounting, ClassWork, ShiftedSpans, SpanRecord, StepRecord
from slipstream.roofline.cost import CostModel, Observation, OnlineCost

_LOGITS, _SAMPLE, _ATTENTION = (OP_CLASSES.index(name) for name in ("logits", "sample", "attention"))
Float64Array = npt.NDArray[np.float64]
_NOTHING = np.zeros(len(OP_CLASSES))


def class_work(program: Program, class_bytes: dict[str, float]) -> dict[str, ClassWork]:
    """Bytes per step and multiply-adds per row of every class that has weights."""
    multiply_adds: dict[str, float] = defaultdict(float)
    for op in program.ops:
        match op:
            case ops.Linear():
                multiply_adds[linear_class(op.weight)] += op.rows_out * op.rows_in
            case ops.Logits():
                multiply_adds["logits"] += op.vocabulary * op.rows_in
    return {
        name: ClassWork(class_bytes.get(name, 0.0), count, name == "logits") for name, count in multiply_adds.items()
    }


def attention_multiply_adds(program: Program) -> float:
    """Multiply-adds per row and token of context, all layers together."""
    return float(sum(op.heads * (op.k_dim + op.v_dim) for op in program.ops if isinstance(op, ops.Attention)))


def accounting_of(model: Model) -> Accounting:
    """Empty accounts for a model; one whose backend keeps none has seconds of the host only."""
    executable = model.executable
    if not isinstance(executable, NativeExecutable):
        return Accounting(OP_CLASSES, {})
    program = executable.program
    work = class_work(program, executable.class_bytes)
    return Accounting(OP_CLASSES, work, attention_multiply_adds(program))


def observation(record: StepRecord) -> Observation:
    """A step as the cost model learns from it."""
    body, head, attention = parts_of(record.classes)
    host = record.scheduling + record.dispatch + record.output + max(record.kernels - body - head - attention, 0.0)
    drafted = not isinstance(record.spans, ShiftedSpans) and any(span.kind == "verify" for span in record.spans)
    return Observation(record.shape, body, head, attention, host, drafted)


def parts_of(classes: Float64Array) -> tuple[float, float, float]:
    """(body, head and sampling, attention) of seconds by class."""
    head = float(classes[_LOGITS] + classes[_SAMPLE])
    attention = float(classes[_ATTENTION])
    return float(classes.sum()) - head - attention, head, attention


class _Marks(NamedTuple):
    """What is noted when a step lands; everything else waits for `StepAccounts.fold`.

    Planning it took from `begun` to `planned`, dealing with its tokens from `ran` to `ended`, keeping the accounts of
    the step that landed before `accounting` seconds after that one's end.
    """

    begun: float
    planned: float
    ran: float
    ended: float
    woken: float | None
    excluded: float
    busy: bool
    accounting: float
    flight: Flight
    repeats: int
    unwanted: tuple[int, ...]
    seconds: Float64Array | None


def _overlap(begun: float, ended: float, low: float, high: float) -> float:
    """Seconds of [begun, ended] within [low, high]."""
    return max(0.0, min(ended, high) - max(begun, low))


class StepAccounts:
    """Marks of one step after the other. Python that runs right after the kernels runs with cold caches, so a step
    only notes its marks, and every `FOLD` steps they become records.
    """

    FOLD = 64
    OBSERVED = 4
    """Of so many steps the cost model learns from one."""

    def __init__(self, model: Model, cost: CostModel | None):
        self._model, self._accounting = model, accounting_of(model)
        self._cost = OnlineCost(cost) if cost else None
        self._pending: list[_Marks] = []
        self._before: tuple[_Marks, float] | None = None
        self._output_before = (0.0, 0.0)
        self._repeated: tuple[Flight, tuple[SpanRecord, ...], int, npt.NDArray[np.int64]] | None = None
        self._woken: float | None = None
        self._excluded = self._own = 0.0
        self.landed = 0.0
        """When the last step's outcome was there."""

    @property
    def accounting(self) -> Accounting:
        """The accounts up to now."""
        self.fold()
        return self._accounting

    @property
    def cost(self) -> CostModel | None:
        """What steps cost, as of now."""
        self.fold()
        return self._cost.model if self._cost else None

    @property
    def snapshot(self) -> CostModel | None:
        """What steps cost, as of the last fold: what the planner works with."""
        return self._cost.model if self._cost else None

    def woken(self) -> None:
        """A request came while there was none."""
        self._woken = time.perf_counter()

    def exclude(self, seconds: float) -> None:
        """So much of the time until the next step is nobody's."""
        self._excluded += seconds

    def end(self, flight: Flight, unwanted: tuple[int, ...], ran: float, busy: bool) -> None:
        """A step has landed: its outcome was there at `ran`; nobody wanted the tokens of some of its drawing sequences.

        `busy` says whether any request is still open.
        """
        ended = time.perf_counter()
        seconds = flight.output.seconds if flight.output is not None else None
        self._pending.append(
            _Marks(
                flight.begun, flight.planned, ran, ended, self._woken, self._excluded, busy, self._own,
                flight, flight.repeats, unwanted, seconds,
            )
        )  # fmt: skip
        self.landed, self._woken, self._excluded = ran, None, 0.0
        if len(self._pending) >= self.FOLD:
            self.fold()
        self._own = time.perf_counter() - ended

    def fold(self) -> None:
        """Turn noted marks into records."""
        pending, self._pending = self._pending, []
        for index, marks in enumerate(pending):
            record = self._record(marks)
            self._accounting.add(record)
            if self._cost is not None and (index % self.OBSERVED == 0 or marks.flight.drafts):
                self._cost.observe(observation(record))

    def _record(self, marks: _Marks) -> StepRecord:
        """Split the time from the end of the step before to the end of this one."""
        taken = StepSeconds(_NOTHING, marks.ran - marks.planned, 0.0, marks.planned)
        if marks.seconds is not None:
            taken = StepSeconds.of(marks.seconds)
        spans, shape = self._spans(marks)
        host = (marks.planned - marks.begun) + (marks.ended - marks.ran)
        last, self._before = self._before, (marks, taken.begun + taken.total)
        waits = _Waits(scheduling=marks.planned - marks.begun, dispatch=max(taken.begun - marks.planned, 0.0))
        if last is not None:
            waits = self._waits(marks, taken.begun, *last)
        drafting = min(marks.flight.forecast.drafting, waits.scheduling)
        return StepRecord(
            taken.begun, waits.idle, waits.outside, waits.scheduling - drafting, waits.dispatch, waits.output,
            taken.total, taken.classes, max(taken.stolen, 0.0), shape, spans, waits.accounting, max(host -
            waits.scheduling - waits.output, 0.0), drafting,
        )  # fmt: skip

    def _spans(self, marks: _Marks) -> tuple[tuple[SpanRecord, ...] | ShiftedSpans, StepShape]:
        """A step's spans and shape; one that repeats the step before is written out in short."""
        if not marks.repeats or self._repeated is None or self._repeated[0] is not marks.flight:
            spans = tuple(span_records(marks.flight, marks.repeats, marks.unwanted))
            starts = np.array([span.start for span in spans]) - marks.repeats
            self._repeated = marks.flight, spans, marks.repeats, starts
            shape = StepShape.of_spans((SpanShape(s.start, s.rows, s.logit_rows) for s in spans), self._model.cache)
            return spans, shape
        _, base, since, starts = self._repeated
        return ShiftedSpans(base, marks.repeats - since), StepShape.of_decodes(
            starts + marks.repeats, self._model.cache
        )

    def _waits(self, marks: _Marks, kernels: float, before: _Marks, low: float) -> _Waits:
        """Where the time between two steps' kernels went: from `low` to `kernels`."""
        free = before.ended + marks.accounting
        scheduling = _overlap(marks.begun, marks.planned, low, kernels)
        output = _overlap(before.ran, before.ended, low, kernels) + _overlap(*self._output_before, low, kernels)
        self._output_before = before.ran, before.ended
        accounting = _overlap(before.ended, free, low, kernels)
        dispatch = _overlap(marks.planned, kernels, low, kernels)
        dispatch += _overlap(low, min(before.ran, marks.begun), low, kernels)
        rest = max(kernels - low - scheduling - output - accounting - dispatch, 0.0)
        idle = 0.0
        if not before.busy and marks.woken is not None:
            idle = min(_overlap(free, marks.woken, low, kernels), rest)
        return _Waits(idle, max(rest - idle - marks.excluded, 0.0), scheduling, dispatch, output, accounting)


class _Waits(NamedTuple):
    """Seconds between two steps' kernels, by what they went to."""

    idle: float = 0.0
    outside: float = 0.0
    scheduling: float = 0.0
    dispatch: float = 0.0
    output: float = 0.0
    accounting: float = 0.0
