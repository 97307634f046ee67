"""Flight: a step from its plan to its tokens, which may come after the next one was planned."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.kernels.backend import StepOutput
from slipstream.program import Rows
from slipstream.program.sampling import DrawColumns
from slipstream.scheduling import Sequence, SpanPlan


class SpanOutcome(NamedTuple):
    """A span as it was run: positions from `start`, whether it drew a token, and whether anybody wanted it."""

    request: int
    start: int
    rows: int
    prompt_length: int
    draws: bool
    wanted: bool


@dataclass(slots=True)
class Flight:
    """A step under way: its spans with the position each starts at, and the sequences that draw a token, in order.

    `begun` and `planned` are when its planning began and when it was handed to the executable; `output` is there at
    once if it was run at once.
    """

    spans: list[tuple[Sequence, int, int]]
    drawing: list[Sequence]
    rows: Rows
    draws: DrawColumns | None
    begun: float
    planned: float = 0.0
    output: StepOutput | None = None

    @classmethod
    def of(cls, spans: SequenceOf[SpanPlan], begun: float) -> Flight:
        """The step of `spans`, whose sequences hold the blocks for it."""
        starts = [(sequence, sequence.computed, rows) for sequence, rows in spans]
        drawing = [sequence for sequence, rows in spans if rows == sequence.missing]
        draws = DrawColumns.of([sequence.draw() for sequence in drawing]) if drawing else None
        return cls(starts, drawing, rows_of(spans), draws, begun)

    def depart(self) -> None:
        """Count what it computes as computed, and what it draws as not yet known."""
        for sequence, _, rows in self.spans:
            sequence.computed += rows
        for index, sequence in enumerate(self.drawing):
            sequence.unknown += 1
            sequence.draw_index = index

    def outcome(self) -> list[SpanOutcome]:
        """What came of each span. Tokens for a sequence that has ended meanwhile come to nothing."""
        drawing = {id(sequence) for sequence in self.drawing}
        return [
            SpanOutcome(s.request, start, rows, s.prompt_length, draws := id(s) in drawing, draws and not s.ended)
            for s, start, rows in self.spans
        ]


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
