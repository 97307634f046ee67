"""Flight: a step from its plan to its tokens, which may come after the next one was planned."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from slipstream.kernels.backend import StepOutput
from slipstream.program import BLOCK_SLOTS, CacheSpec, Rows, SpanShape, StepShape
from slipstream.program.rows import POSITION, SLOT, TOKEN
from slipstream.program.sampling import DrawColumns, Drawn
from slipstream.roofline.accounting import RowKind, SpanRecord
from slipstream.scheduling import Sequence, SpanPlan


@dataclass(slots=True)
class Flight:
    """A step under way: its spans with the position each starts at, and the sequences that draw a token, in order.

    `begun` and `planned` are when its planning began and when it was handed to the executable, `expected` how long it
    should run, if anybody asked; `output` is there at once if it was run at once. A `repeatable` step differs from the
    next one of the same sequences only in tokens and positions, and has been run `repeats` times more, a token further
    each time.
    """

    spans: list[tuple[Sequence, int, int]]
    drawing: list[Sequence]
    rows: Rows
    draws: DrawColumns | None
    begun: float
    planned: float = 0.0
    output: StepOutput | None = None
    repeatable: bool = False
    repeats: int = 0
    deadline: float = math.inf
    expected: float | None = None

    @classmethod
    def of(cls, spans: SequenceOf[SpanPlan], begun: float) -> Flight:
        """The step of `spans`, whose sequences hold the blocks for it."""
        starts = [(sequence, sequence.computed, rows) for sequence, rows in spans]
        drawing = [sequence for sequence, rows in spans if rows == sequence.missing]
        draws = DrawColumns.of([sequence.draw() for sequence in drawing]) if drawing else None
        deadline = min((sequence.deadline for sequence, _ in spans), default=math.inf)
        rows = rows_of(spans)
        repeatable = len(rows) == len(drawing) and all(sequence.draws_alike for sequence in drawing)
        return cls(starts, drawing, rows, draws, begun, repeatable=repeatable, deadline=deadline)

    def repeat(self, drawn: Drawn, begun: float, take: Callable[[Sequence, int], None]) -> None:
        """Become the next step, whose tokens the last one drew; `take` gives a sequence blocks for so many rows."""
        rows, draws = self.rows, self.draws
        assert draws is not None
        rows.columns[TOKEN] = drawn.tokens[:, 0]
        rows.columns[POSITION : SLOT + 1] += 1
        draws.position[:] += 1
        for index, sequence in enumerate(self.drawing):
            if not sequence.computed % BLOCK_SLOTS:
                take(sequence, 1)
                rows.slot[index] = sequence.slot(sequence.computed)
                self.rows = rows = rows.with_table(index, sequence.blocks)
            sequence.computed += 1
            sequence.unknown = 1
        self.begun = begun
        self.repeats += 1

    def depart(self) -> None:
        """Count what it computes as computed, and what it draws as not yet known."""
        for sequence, _, rows in self.spans:
            sequence.computed += rows
        for index, sequence in enumerate(self.drawing):
            sequence.unknown += 1
            sequence.draw_index = index

    def shape(self, cache: CacheSpec) -> StepShape:
        """The step's shape, before it is repeated."""
        drawing = {id(sequence) for sequence in self.drawing}
        return StepShape.of_spans((SpanShape(at, rows, int(id(s) in drawing)) for s, at, rows in self.spans), cache)

    def unwanted(self) -> tuple[int, ...]:
        """Drawing sequences that have ended meanwhile: their tokens come to nothing."""
        return tuple(index for index, sequence in enumerate(self.drawing) if sequence.ended)


def span_records(flight: Flight, repeats: int, unwanted: Container[int]) -> Iterator[SpanRecord]:
    """What became of each span when the step had been repeated so often."""
    drawing = {id(sequence): index for index, sequence in enumerate(flight.drawing)}
    for sequence, start, rows in flight.spans:
        index, at = drawing.get(id(sequence)), start + repeats
        kind: RowKind = "decode" if rows == 1 and at >= sequence.prompt_length else "prefill"
        draws = index is not None
        yield SpanRecord(sequence.request, kind, at, rows, int(draws), int(draws and index not in unwanted))


def rows_of(spans: SequenceOf[SpanPlan]) -> Rows:
    """The spans' rows, column by column: most steps have one row, and are short."""
    owners: list[int] = []
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    parents: list[int] = []
    logit_rows: list[int] = []
    for index, (sequence, count) in enumerate(spans):
        start, end, first = sequence.computed, sequence.computed + count, len(owners)
        if count == 1:
            owners.append(index)
            tokens.append(sequence.token(start))
            positions.append(start)
            slots.append(sequence.slot(start))
            parents.append(-1)
        else:
            owners += [index] * count
            tokens += sequence.tokens[start:end]
            tokens += [sequence.token(p) for p in range(max(len(sequence.tokens), start), end)]
            positions += range(start, end)
            slots += [sequence.slot(position) for position in range(start, end)]
            parents += [-1, *range(first, first + count - 1)]
        if end == sequence.length:
            logit_rows.append(first + count - 1)
    columns = (owners, tokens, positions, slots, parents)
    return Rows.of_columns(columns, logit_rows, [sequence.blocks for sequence, _ in spans])
