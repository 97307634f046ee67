"""Accounting: what every step did and where its seconds went; always on.

Seconds are exclusive and lie on the critical path, so those of a step add up to its wall time. Kernels' seconds come
from the backend's own clock, by class of work; the rest from marks around them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.program import StepShape

Float64Array = npt.NDArray[np.float64]
RowKind = Literal["decode", "prefill", "verify"]
KEEP = 8192
"""Steps that are remembered one by one; totals go on for ever."""


class SpanRecord(NamedTuple):
    """A request's rows in a step. Of a verification's rows, `tokens` came out; the other drafts were wasted."""

    request: int
    kind: RowKind
    start: int
    rows: int
    logit_rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ShiftedSpans:
    """The spans of a step of decodes that was `base` `shift` tokens before: not written out until somebody looks."""

    base: tuple[SpanRecord, ...]
    shift: int

    def __iter__(self) -> Iterator[SpanRecord]:
        for span in self.base:
            yield span._replace(start=span.start + self.shift)


class StepRecord(NamedTuple):
    """One step, from the end of the kernels of the step before; `begun` is when its own began.

    Seconds between the two: `idle` while no request was open, `outside` while one was and nothing below happened;
    `scheduling` is planning and building the rows, `drafting` making the drafts in them, `dispatch` the way into the
    kernels and back, `output` what became of the tokens of the step before (stop conditions, text), `accounting`
    keeping these accounts. What of this was done while kernels ran is `hidden`, and not part of the others. `classes`
    [classes] are the kernels' seconds by
    class and `kernels` all of them; `stolen` is how long a thread of them could not run.
    """

    begun: float
    idle: float
    outside: float
    scheduling: float
    dispatch: float
    output: float
    kernels: float
    classes: Float64Array
    stolen: float
    shape: StepShape
    spans: tuple[SpanRecord, ...] | ShiftedSpans
    accounting: float = 0.0
    hidden: float = 0.0
    drafting: float = 0.0

    @property
    def seconds(self) -> float:
        """The step's wall time, waiting for requests and for the caller left out."""
        return self.scheduling + self.drafting + self.dispatch + self.kernels + self.output


@dataclass
class Totals:
    """Sums over all steps since the start; seconds, bytes and operations by class of work."""

    steps: int = 0
    steps_with_logits: int = 0
    idle: float = 0.0
    outside: float = 0.0
    scheduling: float = 0.0
    dispatch: float = 0.0
    output: float = 0.0
    accounting: float = 0.0
    hidden: float = 0.0
    drafting: float = 0.0
    stolen: float = 0.0
    rows: Counter[str] = field(default_factory=Counter)
    step_rows: Counter[int] = field(default_factory=Counter)
    """Steps by their rows: of more than 2**(key - 1), at most 2**key."""
    logit_rows: int = 0
    kv_bytes: int = 0
    row_context: int = 0
    tokens: int = 0
    wasted_drafts: int = 0


class ClassWork(NamedTuple):
    """What a class of work reads and multiplies: bytes per step, multiply-adds per row (or logit row)."""

    weight_bytes: float
    multiply_adds: float
    per_logit_row: bool = False


class Accounting:
    """The steps of an engine."""

    def __init__(self, classes: Sequence[str], work: dict[str, ClassWork], attention_multiply_adds: float = 0.0):
        """`attention_multiply_adds` is per row and token of context, all layers together."""
        self.classes = tuple(classes)
        self.work = work
        self.attention_multiply_adds = attention_multiply_adds
        self.records: deque[StepRecord] = deque(maxlen=KEEP)
        self.totals = Totals()
        self.class_seconds = np.zeros(len(self.classes))

    def add(self, record: StepRecord) -> None:
        """Count a step."""
        self.records.append(record)
        totals, shape = self.totals, record.shape
        totals.steps += 1
        totals.step_rows[(shape.rows - 1).bit_length()] += 1
        totals.steps_with_logits += shape.logit_rows > 0
        totals.idle += record.idle
        totals.outside += record.outside
        totals.scheduling += record.scheduling
        totals.dispatch += record.dispatch
        totals.output += record.output
        totals.accounting += record.accounting
        totals.hidden += record.hidden
        totals.drafting += record.drafting
        totals.stolen += record.stolen
        totals.logit_rows += shape.logit_rows
        totals.kv_bytes += shape.kv_bytes
        totals.row_context += shape.row_context
        self.class_seconds += record.classes
        if isinstance(record.spans, ShiftedSpans):
            totals.rows["decode"] += len(record.spans.base)
            totals.tokens += len(record.spans.base)
            return
        for span in record.spans:
            totals.rows[span.kind] += span.rows
            totals.tokens += span.tokens
            if span.kind == "verify":
                totals.wasted_drafts += span.rows - span.tokens

    def bytes_by_class(self) -> dict[str, float]:
        """Bytes read since the start, the cache under "attention"."""
        steps, with_logits = self.totals.steps, self.totals.steps_with_logits
        read = {
            name: work.weight_bytes * (with_logits if work.per_logit_row else steps) for name, work in self.work.items()
        }
        return read | {"attention": float(self.totals.kv_bytes)}

    def operations_by_class(self) -> dict[str, float]:
        """Operations done since the start; a multiply and an add are two."""
        rows = sum(self.totals.rows.values())
        done = {
            name: 2.0 * work.multiply_adds * (self.totals.logit_rows if work.per_logit_row else rows)
            for name, work in self.work.items()
        }
        return done | {"attention": 2.0 * self.attention_multiply_adds * self.totals.row_context}

    def work_of(self, records: Iterable[StepRecord]) -> tuple[float, float]:
        """(bytes, operations) of some steps."""
        nbytes = operations = 0.0
        for record in records:
            shape = record.shape
            nbytes += shape.kv_bytes
            operations += 2.0 * self.attention_multiply_adds * shape.row_context
            for work in self.work.values():
                rows = shape.logit_rows if work.per_logit_row else shape.rows
                nbytes += work.weight_bytes if rows else 0.0
                operations += 2.0 * work.multiply_adds * rows
        return nbytes, operations

    def seconds_by_class(self) -> dict[str, float]:
        """Seconds of the kernels since the start, by class of work."""
        return dict(zip(self.classes, self.class_seconds.tolist(), strict=True))
