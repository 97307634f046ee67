"""StepShape: what the cost of a step depends on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.program.cache import CacheSpec
from slipstream.program.rows import Rows


class SpanShape(NamedTuple):
    """A sequence's rows in a step: positions start, start + 1, …, and how many of them want logits."""

    start: int
    rows: int
    logit_rows: int


@dataclass(frozen=True, slots=True)
class StepShape:
    """The argument of the cost model `seconds(StepShape)`.

    `kv_bytes` is read from the cache once per span; `row_context` is the sum over rows of the context
    each attends to, averaged over layers, which is what attention's arithmetic goes by.
    """

    rows: int
    logit_rows: int
    kv_bytes: int
    row_context: int
    distinct_experts: int = 0
    collectives: int = 0

    @classmethod
    def of(cls, rows: Rows, cache: CacheSpec, collectives: int = 0) -> StepShape:
        """The shape of a step over any `rows`, trees included."""
        context = rows.position.astype(np.int64) + 1
        last = np.flatnonzero(np.diff(rows.sequence, append=-1))
        kv_bytes = seen = layers = 0
        for group in cache:
            visible = context if group.window is None else np.minimum(context, group.window)
            kv_bytes += int(visible[last].sum()) * group.bytes_per_token
            seen += int(visible.sum()) * group.layers
            layers += group.layers
        return cls(len(rows), len(rows.logit_rows), kv_bytes, seen // max(layers, 1), 0, collectives)

    @classmethod
    def of_decodes(cls, positions: npt.NDArray[np.int64], cache: CacheSpec) -> StepShape:
        """The shape of a step of one row for each sequence, all with logits, at these positions."""
        context, count = positions + 1, len(positions)
        kv_bytes = seen = layers = 0
        for group in cache:
            visible = int((context if group.window is None else np.minimum(context, group.window)).sum())
            kv_bytes += visible * group.bytes_per_token
            seen += visible * group.layers
            layers += group.layers
        return cls(count, count, kv_bytes, seen // max(layers, 1))

    @classmethod
    def of_spans(cls, spans: Iterable[SpanShape], cache: CacheSpec, collectives: int = 0) -> StepShape:
        """The same for chains, without looking at every row."""
        rows = logit_rows = kv_bytes = seen = 0
        layers = sum(group.layers for group in cache)
        for start, count, logits in spans:
            rows += count
            logit_rows += logits
            for group in cache:
                end = start + count
                kv_bytes += (end if group.window is None else min(end, group.window)) * group.bytes_per_token
                seen += _seen(start, end, group.window) * group.layers
        return cls(rows, logit_rows, kv_bytes, seen // max(layers, 1), 0, collectives)


def _seen(start: int, end: int, window: int | None) -> int:
    """Sum over positions [start, end) of the positions each sees, itself included."""
    if window is not None and end > window:
        full = max(start, window)
        return _seen(start, window, None) * (start < window) + (end - full) * window
    return (end * (end + 1) - start * (start + 1)) // 2
