"""Row and Rows: the tokens one step computes, and where their keys and values go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

_SLACK = 8  # columns that a block table grows by
NO_PARENT = -1
"""A row's parent when its predecessor is already in the cache (or it is at position 0)."""

SEQUENCE, TOKEN, POSITION, SLOT, PARENT = range(5)
"""The columns of `Rows.columns`."""


def sampled(draw: int) -> int:
    """What a row's token is before it is known: the one that draw `draw` of the last step comes to."""
    return -1 - draw


class Row(NamedTuple):
    """One token of one sequence in a step.

    `parent` is the index, within the step, of the row that holds the token just before this one; it
    is what makes a span a chain or a tree. A row sees the positions its sequence had cached before
    the step, its ancestors, and itself.
    """

    sequence: int
    token: int
    position: int
    slot: int
    parent: int = NO_PARENT
    wants_logits: bool = False
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step as columns, each of shape [rows]; spans are contiguous.

    `columns` is [5, rows]: sequence, token, position, slot, parent, in one piece so that a backend takes
    them with one look. `logit_rows` are the indices of the rows that want logits, in order.
    `block_tables` is [sequences, blocks] int32 (unused entries are -1): the blocks that hold the positions
    cached before the step, and those the step writes. `Row.sequence` indexes it.
    """

    columns: Int32Array
    logit_rows: Int32Array
    adapter: Int32Array
    block_tables: Int32Array

    def __len__(self) -> int:
        return self.columns.shape[1]

    @property
    def sequence(self) -> Int32Array:
        """Index of each row's sequence in the block tables."""
        return self.columns[SEQUENCE]

    @property
    def token(self) -> Int32Array:
        """Token ids."""
        return self.columns[TOKEN]

    @property
    def position(self) -> Int32Array:
        """Logical positions."""
        return self.columns[POSITION]

    @property
    def slot(self) -> Int32Array:
        """Cache slots."""
        return self.columns[SLOT]

    @property
    def parent(self) -> Int32Array:
        """Rows that hold the token before, or NO_PARENT."""
        return self.columns[PARENT]

    @classmethod
    def of_columns(
        cls,
        columns: Sequence[Sequence[int]],
        logit_rows: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        adapter: Sequence[int] | None = None,
    ) -> Rows:
        """From columns that are known to be right: sequence, token, position, slot, parent."""
        width = max(map(len, block_tables), default=0)
        tables = np.array([[*table, *[-1] * (width - len(table))] for table in block_tables], np.int32)
        count = len(columns[0])
        return cls(
            np.array(columns, np.int32).reshape(5, count),
            np.array(logit_rows, np.int32),
            np.zeros(count, np.int32) if adapter is None else np.array(adapter, np.int32),
            tables.reshape(len(block_tables), width),
        )

    @classmethod
    def of(cls, rows: Sequence[Row], block_tables: Sequence[Sequence[int]]) -> Rows:
        """Columns from single rows. Raises ValueError if the rows contradict one another."""
        result = cls.of_columns(
            [[row[i] for row in rows] for i in range(5)],
            [index for index, row in enumerate(rows) if row.wants_logits],
            block_tables,
            [row.adapter for row in rows],
        )
        result.check()
        return result

    def with_table(self, index: int, blocks: Sequence[int]) -> Rows:
        """The same rows with another block table for a sequence; in place if it is wide enough."""
        tables = self.block_tables
        if len(blocks) > tables.shape[1]:
            tables = np.full((len(tables), len(blocks) + _SLACK), -1, np.int32)
            tables[:, : self.block_tables.shape[1]] = self.block_tables
        tables[index, : len(blocks)] = blocks
        return self if tables is self.block_tables else replace(self, block_tables=tables)

    def resolve(self, drawn: Int32Array | Sequence[int]) -> None:
        """Fill in the tokens that the last step drew. Raises ValueError for a draw that it did not make."""
        for index in np.flatnonzero(self.token < 0):
            draw = -1 - int(self.token[index])
            if draw >= len(drawn):
                raise ValueError("a row waits for a token that the last step did not draw")
            self.token[index] = drawn[draw]

    def check(self) -> None:
        """Raise ValueError if a span is split, a parent is wrong, or a slot is written twice."""
        starts = np.flatnonzero(np.diff(self.sequence, prepend=-1))
        if len(np.unique(self.sequence[starts])) != len(starts):
            raise ValueError("the rows of a sequence must be contiguous")
        if len(np.unique(self.slot)) != len(self.slot):
            raise ValueError("two rows of a step write the same slot")
        for index, parent in enumerate(self.parent):
            if parent == NO_PARENT:
                continue
            if not 0 <= parent < index or self.sequence[parent] != self.sequence[index]:
                raise ValueError(f"row {index}: parent {parent} is no earlier row of its sequence")
            if self.position[parent] + 1 != self.position[index]:
                raise ValueError(f"row {index}: position does not follow its parent's")
