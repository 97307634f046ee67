"""Rows of a drafter's steps: pieces of answers under the answers' own blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slipstream.program import NO_PARENT, Rows
from slipstream.scheduling import Sequence as Answer


class Piece(NamedTuple):
    """Tokens of an answer from a position on; those of a tree name their parents within the piece.

    Token i lies in the slot of position start + i, whatever its own position is.
    """

    answer: Answer
    start: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None


def rows_of(pieces: Sequence[Piece], draws: str = "last") -> Rows:
    """The rows of a step. `draws` says which have logits: "none", the "last" of each piece, or "all"."""
    owners: list[int] = []
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    parents: list[int] = []
    logit_rows: list[int] = []
    for index, (answer, start, those, tree) in enumerate(pieces):
        first, count = len(owners), len(those)
        owners += [index] * count
        tokens += those
        slots += [answer.slot(start + place) for place in range(count)]
        if tree is None:
            positions += range(start, start + count)
            parents += [NO_PARENT, *range(first, first + count - 1)]
        else:
            depths: list[int] = []
            for parent in tree:
                depths.append(0 if parent == NO_PARENT else depths[parent] + 1)
            positions += [start + depth for depth in depths]
            parents += [NO_PARENT if parent == NO_PARENT else first + parent for parent in tree]
        if draws == "all":
            logit_rows += range(first, len(owners))
        elif draws == "last":
            logit_rows.append(len(owners) - 1)
    columns = (owners, tokens, positions, slots, parents)
    return Rows.of_columns(columns, logit_rows, [piece.answer.blocks for piece in pieces])
