"""The engine's side of accounting: marks around a step, and what a program reads and multiplies by class."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.engine.model import Model
from slipstream.kernels.native import NativeExecutable
from slipstream.program import Program, SpanShape, StepShape, ops
from slipstream.program.op_classes import OP_CLASSES, linear_class
from slipstream.roofline.accounting import Accounting, ClassWork, RowKind, SpanRecord, StepRecord
from slipstream.roofline.cost import CostModel, Observation, OnlineCost
from slipstream.scheduling import SpanPlan

_LOGITS, _SAMPLE, _ATTENTION = (OP_CLASSES.index(name) for name in ("logits", "sample", "attention"))
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
    return Observation(record.shape, body, head, attention, host)


def parts_of(classes: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """(body, head and sampling, attention) of seconds by class."""
    head = float(classes[_LOGITS] + classes[_SAMPLE])
    attention = float(classes[_ATTENTION])
    return float(classes.sum()) - head - attention, head, attention


class _Marks(NamedTuple):
    """What is noted while a step runs; everything else waits for `StepAccounts.fold`.

    `spans` are (request, first position, rows, prompt length, tokens) each.
    """

    begun: float
    planned: float
    ran: float
    ended: float
    woken: float | None
    excluded: float
    busy: bool
    accounting: float
    spans: list[tuple[int, int, int, int, int]]
    seconds: npt.NDArray[np.float64] | None


def _span(request: int, start: int, rows: int, prompt: int, tokens: int) -> SpanRecord:
    draws = int(start + rows == tokens)
    kind: RowKind = "decode" if rows == 1 and start >= prompt else "prefill"
    return SpanRecord(request, kind, start, rows, draws, draws)


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
        self._ended: float | None = None
        self._was_busy = False
        self._woken: float | None = None
        self._begun = self._planned = self._ran = self._excluded = self._own = 0.0
        self._spans: list[tuple[int, int, int, int, int]] = []

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

    def begin(self) -> None:
        """A step begins."""
        self._begun = time.perf_counter()

    def planned(self, spans: list[SpanPlan]) -> None:
        """Its rows are ready."""
        self._spans = [(s.request, s.computed, rows, s.prompt_length, len(s.tokens)) for s, rows in spans]
        self._planned = time.perf_counter()

    def ran(self) -> None:
        """The kernels are done."""
        self._ran = time.perf_counter()

    def woken(self) -> None:
        """A request came while there was none."""
        self._woken = time.perf_counter()

    def exclude(self, seconds: float) -> None:
        """So much of the time until the next step is nobody's."""
        self._excluded += seconds

    def end(self, busy: bool) -> None:
        """The step is over; `busy` says whether any request is still open."""
        ended = time.perf_counter()
        seconds = self._model.executable.step_seconds()
        marks = (self._begun, self._planned, self._ran, ended, self._woken, self._excluded, busy, self._own)
        self._pending.append(_Marks(*marks, self._spans, seconds))
        self._woken, self._excluded = None, 0.0
        if len(self._pending) >= self.FOLD:
            self.fold()
        self._own = time.perf_counter() - ended

    def fold(self) -> None:
        """Turn noted marks into records."""
        pending, self._pending = self._pending, []
        for index, marks in enumerate(pending):
            record = self._record(marks)
            self._accounting.add(record)
            if self._cost is not None and index % self.OBSERVED == 0:
                self._cost.observe(observation(record))

    def _record(self, marks: _Marks) -> StepRecord:
        call = marks.ran - marks.planned
        classes, kernels, stolen = _NOTHING, call, 0.0
        if marks.seconds is not None:
            classes, kernels, stolen = marks.seconds[:-2], float(marks.seconds[-2]), float(marks.seconds[-1])
        idle = outside = accounting = 0.0
        if self._ended is not None:
            accounting = marks.accounting
            free = self._ended + accounting
            since = max(marks.woken, free) if not self._was_busy and marks.woken is not None else free
            idle, outside = since - free, marks.begun - since - marks.excluded
        self._ended, self._was_busy = marks.ended, marks.busy
        spans = tuple(_span(*span) for span in marks.spans)
        return StepRecord(
            marks.begun,
            idle,
            outside,
            marks.planned - marks.begun,
            call - kernels,
            marks.ended - marks.ran,
            kernels,
            classes,
            max(stolen, 0.0),
            StepShape.of_spans((SpanShape(s.start, s.rows, s.logit_rows) for s in spans), self._model.cache),
            spans,
            accounting,
        )
