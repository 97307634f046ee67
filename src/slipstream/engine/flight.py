"""Flight: a step from its plan to its tokens, which may come after the next one was planned."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.kernels.backend import StepOutput
from slipstream.program import BLOCK_SLOTS, CacheSpec, Draft, Rows, SpanShape, StepShape
from slipstream.program.draft import ROOT
from slipstream.program.rows import POSITION, SLOT, TOKEN
from slipstream.program.sampling import DrawColumns, Drawn
from slipstream.roofline.accounting import RowKind, SpanRecord
from slipstream.scheduling import Sequence, SpanPlan


class Leg(NamedTuple):
    """A sequence's rows in a step: `rows` tokens from position `start`, then those of its draft."""

    sequence: Sequence
    start: int
    rows: int
    draft: Draft | None = None


@dataclass(slots=True)
class Forecast:
    """What a step with drafts was expected to bring: seconds its decodes would take without, and how much faster it is.

    `drafting` are the seconds that its drafts took to make, `extra` those that verifying them should add.
    """

    plain: float = 0.0
    speedup: float = 1.0
    drafting: float = 0.0
    extra: float = 0.0


@dataclass(slots=True)
class Flight:
    """A step under way: its legs, and the sequences that draw a token, in order.

    A sequence with a draft draws after each of its tokens too; `firsts` are the draws after the last known tokens.
    `begun` and `planned` are when its planning began and when it was handed to the executable, `expected` how long it
    should run, if anybody asked; `output` is there at once if it was run at once. A `repeatable` step differs from the
    next one of the same sequences only in tokens, positions and masks, and has been run `repeats` times more, a token
    further each time. Of the drawing sequences with a constraint, those at the places `masked` draw by its mask, and
    those at `unmasked` without (see `engine/redraw.py`); `tenants` counts all by tenant. Of a step with drafts,
    `tokens` says how many each drawing sequence got out of it.
    """

    spans: list[Leg]
    drawing: list[Sequence]
    firsts: list[int]
    rows: Rows
    draws: DrawColumns | None
    begun: float
    drafts: dict[int, Draft]
    planned: float = 0.0
    output: StepOutput | None = None
    repeatable: bool = False
    repeats: int = 0
    deadline: float = math.inf
    expected: float | None = None
    tokens: list[int] = field(default_factory=list)
    forecast: Forecast = field(default_factory=Forecast)
    masked: list[int] = field(default_factory=list)
    unmasked: list[int] = field(default_factory=list)
    tenants: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, spans: SequenceOf[SpanPlan], begun: float, drafts: dict[int, Draft], *, late: bool = True) -> Flight:
        """The step of `spans`, whose sequences hold the blocks for it; `drafts` are theirs, by id of the sequence."""
        legs = [Leg(s, s.computed, rows, drafts.get(id(s)) if drafts else None) for s, rows, _ in spans]
        drawing = [leg.sequence for leg in legs if leg.rows == leg.sequence.missing]
        held = [index for index, sequence in enumerate(drawing) if sequence.constraint is not None]
        unmasked = [index for index in held if late and drawing[index].redraws]
        masked = [index for index in held if index not in unmasked]
        firsts, columns = _draws_of(drawing, drafts, masked)
        deadline = min((leg.sequence.deadline for leg in legs), default=math.inf)
        rows = rows_of(legs)
        repeatable = not drafts and len(rows) == len(drawing) and all(sequence.repeats for sequence in drawing)
        return cls(
            legs, drawing, firsts, rows, columns, begun, drafts, repeatable=repeatable, deadline=deadline,
            masked=masked, unmasked=unmasked, tenants=Counter(sequence.tenant for sequence in drawing),
        )  # fmt: skip

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
        for index in self.masked:
            constraint = self.drawing[index].constraint
            assert constraint is not None
            mask = constraint.mask()
            draws.masks[draws.mask_of[index], : len(mask)] = mask
        self.begun = begun
        self.repeats += 1

    def depart(self) -> None:
        """Count what it computes as computed, and what it draws as not yet known; drafts do not count."""
        for leg in self.spans:
            leg.sequence.computed += leg.rows
        for first, sequence in zip(self.firsts, self.drawing, strict=True):
            sequence.unknown += 1
            sequence.draw_index = first

    def shape(self, cache: CacheSpec) -> StepShape:
        """The step's shape, before it is repeated."""
        drawing = {id(sequence) for sequence in self.drawing}
        spans = []
        for sequence, start, rows, draft in self.spans:
            drafts = len(draft) if draft is not None else 0
            spans.append(SpanShape(start, rows + drafts, int(id(sequence) in drawing) + drafts))
        return StepShape.of_spans(spans, cache)

    def unwanted(self) -> tuple[int, ...]:
        """Drawing sequences that have ended meanwhile: their tokens come to nothing."""
        return tuple(index for index, sequence in enumerate(self.drawing) if sequence.ended)


def span_records(flight: Flight, repeats: int, unwanted: Container[int]) -> Iterator[SpanRecord]:
    """What became of each span when the step had been repeated so often."""
    drawing = {id(sequence): index for index, sequence in enumerate(flight.drawing)}
    for sequence, start, rows, draft in flight.spans:
        index, at = drawing.get(id(sequence)), start + repeats
        if draft is not None and index is not None:
            count = rows + len(draft)
            yield SpanRecord(sequence.request, "verify", at, count, 1 + len(draft), flight.tokens[index])
            continue
        kind: RowKind = "decode" if rows == 1 and at >= sequence.prompt_length else "prefill"
        draws = index is not None
        yield SpanRecord(sequence.request, kind, at, rows, int(draws), int(draws and index not in unwanted))


def _draws_of(
    drawing: list[Sequence], drafts: dict[int, Draft], masked: list[int]
) -> tuple[list[int], DrawColumns | None]:
    """(each sequence's first draw, all draws)."""
    if not drafts:
        if drawing and not masked and all(sequence.draws_plainly for sequence in drawing):
            return list(range(len(drawing))), DrawColumns.plain(
                [s.params for s in drawing], [s.seed for s in drawing], [s.choice for s in drawing],
                [len(s.tokens) + s.unknown for s in drawing],
            )  # fmt: skip
        draws = [sequence.draw(masked=index in masked) for index, sequence in enumerate(drawing)]
        return list(range(len(draws))), DrawColumns.of(draws) if draws else None
    if len(drawing) == 1 and not masked and drawing[0].draws_plainly and (draft := drafts.get(id(drawing[0]))):
        return [0], DrawColumns.along(drawing[0].draw(masked=False), drawing[0].draw_positions(draft))
    firsts, draws = [], []
    for index, sequence in enumerate(drawing):
        draft, asked = drafts.get(id(sequence)), index in masked
        firsts.append(len(draws))
        draws += [sequence.draw(masked=asked)] if draft is None else sequence.draws(draft, masked=asked)
    return firsts, DrawColumns.of(draws) if draws else None


def rows_of(legs: SequenceOf[Leg]) -> Rows:
    """The legs' rows, column by column: most steps have one row, and are short.

    A draft's tokens lie one slot after the other, whatever their positions: a chain's are in place then.
    """
    owners: list[int] = []
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    parents: list[int] = []
    logit_rows: list[int] = []
    for index, (sequence, start, count, draft) in enumerate(legs):
        end, first = start + count, len(owners)
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
        if draft is not None:
            root = len(owners) - 1
            owners += [index] * len(draft)
            tokens += draft.tokens
            positions += [end + depth for depth in draft.depths]
            slots += [sequence.slot(end + place) for place in range(len(draft))]
            parents += [root if parent == ROOT else root + 1 + parent for parent in draft.parents]
            logit_rows += range(root + 1, len(owners))
    columns = (owners, tokens, positions, slots, parents)
    return Rows.of_columns(columns, logit_rows, [leg.sequence.blocks for leg in legs])
