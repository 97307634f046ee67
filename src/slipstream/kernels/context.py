"""From a row to the cache slots it sees, in logical order: the map behind chains and trees."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream.program import BLOCK_SLOTS, NO_PARENT, Rows, ops


def visible_slots(rows: Rows, index: int, op: ops.Attention) -> npt.NDArray[np.int64]:
    """Slots that row `index` sees in an attention op, in logical order."""
    slots = row_slots(rows, index) if op.mask is ops.MaskKind.CAUSAL else span_slots(rows, index)
    first = op.start
    if op.window is not None:
        base = int(rows.position[np.flatnonzero(rows.sequence == rows.sequence[index])[0]])
        first = max(first, base - op.window if op.anchored else len(slots) - op.window)
    return slots[first:]


def row_slots(rows: Rows, index: int) -> npt.NDArray[np.int64]:
    """Slots of positions 0 … position of row `index`: cached ones, then its ancestors, then itself."""
    own: list[int] = []
    at = index
    while True:
        own.append(int(rows.slot[at]))
        parent = int(rows.parent[at])
        if parent == NO_PARENT:
            break
        at = parent
    cached = np.arange(int(rows.position[at]))
    table = rows.block_tables[rows.sequence[index]]
    slots = table[cached // BLOCK_SLOTS].astype(np.int64) * BLOCK_SLOTS + cached % BLOCK_SLOTS
    return np.concatenate([slots, np.array(own[::-1], np.int64)])


def span_slots(rows: Rows, index: int) -> npt.NDArray[np.int64]:
    """Slots a row of a block-masked span sees: the cached positions, then all rows of the span."""
    span = np.flatnonzero(rows.sequence == rows.sequence[index])
    first = row_slots(rows, int(span[0]))[:-1]
    return np.concatenate([first, rows.slot[span].astype(np.int64)])
