"""Weights as stored blocks of any type, made at random: a WeightSource without a file."""

from __future__ import annotations

import zlib

import numpy as np

from slipstream.models.weights import StoredRows
from slipstream.program import TENSOR_TYPES, ShardPlan, TensorType, WeightUse
from slipstream.weights import StoredTensor

HALF_SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
}
"""Where in a block the half-precision scales lie."""


def random_blocks(kind: TensorType, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Raw bytes [rows, bytes] of a matrix whose numbers are of order 1 / sqrt(columns)."""
    values = rng.standard_normal((rows, columns)).astype(np.float32) / np.float32(columns**0.5)
    match kind.name:
        case "F32":
            return values.view(np.uint8)
        case "F16":
            return values.astype(np.float16).view(np.uint8)
        case "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    raw = rng.integers(0, 256, (rows * columns // kind.block, kind.bytes), dtype=np.uint8)
    if kind.name == "MXFP4":
        raw[:, 0] = rng.integers(118, 123, len(raw))
    largest = {"Q8_0": 127, "IQ4_NL": 127, "Q6_K": 32 * 100, "Q2_K": 3 * 15, "Q3_K": 4 * 32}
    size = largest.get(kind.name, 15 * 63 if kind.name.endswith("_K") else 15)
    for place in HALF_SCALES.get(kind.name, ()):
        scale = rng.uniform(0.5, 2.0, len(raw)) * 2 / size / columns**0.5
        if place == 2:
            scale = -scale * size / 2 if kind.name in ("Q4_1", "Q5_1") else scale * 0.5
        raw[:, place : place + 2] = scale.astype(np.float16)[:, None].view(np.uint8)
    return raw.reshape(rows, -1)


class BlockWeights:
    """Every matrix as random blocks of `kind` (or of `kinds[name]`), every vector around 1 or 0."""

    def __init__(self, kind: str, seed: int = 0, kinds: dict[str, str] | None = None):
        self.kind, self.seed, self.kinds = kind, seed, kinds or {}
        self._made: dict[str, StoredTensor] = {}

    def stored(self, use: WeightUse, shard: ShardPlan) -> StoredRows:
        if use.name not in self._made:
            kind = TENSOR_TYPES[self.kinds.get(use.name, self.kind)]
            if use.shape[1] % kind.block:
                kind = TENSOR_TYPES["Q8_0" if use.shape[1] % 32 == 0 else "F16"]
            rng = np.random.default_rng(self.seed + zlib.crc32(use.name.encode()))
            raw = random_blocks(kind, *use.shape, rng)
            self._made[use.name] = StoredTensor(use.name, kind, use.shape, raw.reshape(-1))
        tensor = self._made[use.name]
        return StoredRows(tensor, np.arange(use.shape[0]), slice(0, use.shape[1]))

    def float32(self, use: WeightUse, shard: ShardPlan) -> np.ndarray:
        if use.role != "vector":
            return self.stored(use, shard).tensor.float32()
        rng = np.random.default_rng(self.seed + zlib.crc32(use.name.encode()))
        offset = 1.0 if "norm" in use.name else 0.0
        return (offset + 0.3 * rng.standard_normal(use.shape)).astype(np.float32)
