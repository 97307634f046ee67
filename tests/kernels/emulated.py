"""The reference with the native numerics contract: int8 activations in groups of 32, bfloat16 attention."""

from __future__ import annotations

import numpy as np

from slipstream.kernels.context import row_slots
from slipstream.kernels.reference.cache import round_bf16
from slipstream.kernels.reference.executable import ReferenceExecutable
from slipstream.program import KVFormat, Program, Rows, ops
from tests.blocks import BlockWeights

INTEGER_TYPES = ("Q", "IQ", "MX")


def int8_groups(x: np.ndarray) -> np.ndarray:
    """x [rows, k] after rounding to int8 with one scale per 32 inputs."""
    rows, k = x.shape
    padded = np.zeros((rows, -(-k // 32) * 32), np.float32)
    padded[:, :k] = x
    groups = padded.reshape(rows, -1, 32)
    peak = np.abs(groups).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    rounded = np.rint(groups * inverse) * (peak / np.float32(127))
    return rounded.reshape(rows, -1)[:, :k].astype(np.float32)


class EmulatedExecutable(ReferenceExecutable):
    """Rounds the inputs of matrices and of attention as the native kernels do."""

    def __init__(self, program: Program, weights: BlockWeights, blocks: int):
        super().__init__(program, weights, blocks)
        self.source = weights

    def _rounded(self, name: str, x: np.ndarray) -> np.ndarray:
        use = self.program.weights[name]
        kind = self.source.stored(use, self.program.shard).tensor.type.name
        if kind.startswith(INTEGER_TYPES):
            return int8_groups(x)
        return round_bf16(x) if kind == "BF16" else x

    def _compute(self, op: ops.Op, values: dict[int, np.ndarray], rows: Rows) -> np.ndarray:
        if isinstance(op, ops.Linear):
            values = {**values, op.x: self._rounded(op.weight, values[op.x])}
        return super()._compute(op, values, rows)

    def _attention(self, op: ops.Attention, q: np.ndarray, rows: Rows) -> np.ndarray:
        """Queries and weights in bfloat16; one split of the context, so at most 256 positions."""
        cache = self.cache[op.group]
        queries = round_bf16(q).reshape(len(rows), op.kv_heads, op.heads // op.kv_heads, op.k_dim)
        out = np.empty((len(rows), op.heads * op.v_dim), np.float32)
        for index in range(len(rows)):
            slots = row_slots(rows, index)
            assert len(slots) <= 256
            slots = slots[-op.window :] if op.window else slots
            k, v = cache.k[op.layer, slots], cache.values(op.layer, slots)
            scores = np.einsum("hgd,thd->hgt", queries[index], k) * np.float32(op.scale)
            if op.softcap:
                scores = op.softcap * np.tanh(scores / np.float32(op.softcap))
            weights = round_bf16(np.exp(scores - scores.max(-1, keepdims=True)))
            total = weights.sum(-1, keepdims=True)
            if cache.group.format is KVFormat.INT8:
                scale = np.abs(v).max(-1).T[:, None] / np.float32(127)  # [heads, 1, positions]
                v = v / np.where(scale > 0, scale, 1).transpose(2, 0, 1)
                weights = round_bf16(weights * scale)
            out[index] = (np.einsum("hgt,thd->hgd", weights, v) / total).reshape(-1)
        return out

    def _logits(self, op: ops.Logits, x: np.ndarray) -> np.ndarray:
        return super()._logits(op, self._rounded(op.weight, x))
