"""StepShape: what the cost of a step depends on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.program.cache import CacheSpec
from slipstream.program.rows import Rows


@dataclass(frozen=True, slots=True)
class StepShape:
    """The argument of the cost model `seconds(StepShape)`.

    `kv_bytes` is read from the cache once per span; `row_context` is the sum over rows of the context
    each attends to, which is what attention's arithmetic goes by.
    """

    rows: int
    logit_rows: int
    kv_bytes: int
    row_context: int
    distinct_experts: int = 0
    collectives: int = 0

    @classmethod
    def of(cls, rows: Rows, cache: CacheSpec, collectives: int = 0) -> StepShape:
        """The shape of a step over `rows`."""
        context = rows.position.astype(np.int64) + 1
        kv_bytes = 0
        last = np.flatnonzero(np.diff(rows.sequence, append=-1))
        for group in cache:
            span_context = context[last]
            if group.window is not None:
                span_context = np.minimum(span_context, group.window)
            kv_bytes += int(span_context.sum()) * group.bytes_per_token
        return cls(len(rows), len(rows.logit_rows), kv_bytes, int(context.sum()), 0, collectives)
