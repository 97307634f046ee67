"""A head over fewer tokens: drafting needs the likely ones only, and the head is what a small model reads most of.

The idea is FR-Spec's (Zhao et al., arXiv 2502.14856). Byte-pair vocabularies number their tokens in the order of their
merges, the most frequent first, so that without counts the first ones are the ones to keep.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from slipstream.models.weights import StoredRows, WeightSource
from slipstream.program import Program, ShardPlan, WeightUse, ops

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


def first_tokens(vocabulary: int, count: int, also: Iterable[int]) -> Int32Array:
    """The first `count` tokens and those in `also` (end of answer, …), ascending."""
    kept = {token for token in also if 0 <= token < vocabulary}
    return np.array(sorted(kept.union(range(min(count, vocabulary)))), np.int32)


class ReducedWeights:
    """Weights of a program whose head has some rows only; the others are those of `whole`."""

    def __init__(self, whole: WeightSource, use: WeightUse, tokens: Int32Array, name: str):
        self._whole, self._use, self._tokens, self._name = whole, use, tokens, name

    def stored(self, use: WeightUse, shard: ShardPlan) -> StoredRows | None:
        """The weight as it lies in the file."""
        if use.name != self._name:
            return self._whole.stored(use, shard)
        stored = self._whole.stored(self._use, shard)
        return None if stored is None else stored._replace(rows=stored.rows[self._tokens])

    def float32(self, use: WeightUse, shard: ShardPlan) -> Float32Array:
        """The weight's numbers."""
        if use.name != self._name:
            return self._whole.float32(use, shard)
        return np.ascontiguousarray(self._whole.float32(self._use, shard)[self._tokens])


def with_reduced_head(program: Program, weights: WeightSource, tokens: Int32Array) -> tuple[Program, WeightSource]:
    """The program with a head over `tokens` only, and its weights. Raises ValueError for a head with a bias."""
    head = next(op for op in program.ops if isinstance(op, ops.Logits))
    if head.bias is not None:
        raise ValueError("a head with a bias cannot be cut")
    whole = program.weights[head.weight]
    name = f"head-{hashlib.sha256(tokens.tobytes()).hexdigest()[:16]}.weight"
    use = WeightUse(name, (len(tokens), whole.shape[1]))
    uses = {**program.weights, name: use}
    if any(isinstance(op, ops.Embed) and op.table == head.weight for op in program.ops):
        uses[head.weight] = replace(whole, role="embedding")
    else:
        del uses[head.weight]
    smaller = replace(head, weight=name, vocabulary=len(tokens))
    new_ops = tuple(smaller if op is head else op for op in program.ops)
    cut = replace(program, ops=new_ops, weights=uses, vocabulary=len(tokens))
    return cut, ReducedWeights(weights, whole, tokens, name)
