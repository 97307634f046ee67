"""From stored tensors to packed matrices: which format each type takes, and the packing itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from slipstream.kernels.native import _native
from slipstream.models.weights import StoredRows, WeightSource
from slipstream.program import TENSOR_TYPES, ShardPlan, WeightUse

LAYOUT = 2
"""Version of the packed layout and of how floats are quantised; a pack cache of another one is not read."""

Quantization = Literal["none", "int8", "int4", "int4-128"]
"""int4 has a scale for 32 numbers, int4-128 for 128."""

_EXACT = {
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "Q4_0": "i4s",
    "Q4_1": "i4m",
    "Q5_0": "i5s",
    "Q5_1": "i5m",
    "Q8_0": "i8",
    "IQ4_NL": "i8",
    "MXFP4": "i8",
    "Q3_K": "i6k",
    "Q4_K": "i4k",
    "Q5_K": "i5k",
    "Q6_K": "i6k",
}
_QUANTIZED = {"int8": "i8", "int4": "i4s", "int4-128": "i4s128"}
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Packing:
    """How one weight is packed; `through_float` means: dequantised first, then quantised anew."""

    use: WeightUse
    format: str
    through_float: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrix."""
        return _native.packed_bytes(self.format, self.use.shape[0], self.use.shape[1])


def plan(
    use: WeightUse, weights: WeightSource, shard: ShardPlan, quantization: Quantization, requantize: bool = False
) -> Packing:
    """Choose a weight's format. Types without a kernel of their own become int8.

    `quantization` is for weights in floats; with `requantize` for all of them.
    """
    stored = weights.stored(use, shard)
    kind = stored.tensor.type.name if stored else "F32"
    if (kind in _FLOATS or requantize) and quantization != "none":
        return Packing(use, _QUANTIZED[quantization], True)
    if kind not in _EXACT:
        return Packing(use, "i8", True)
    if stored is None:
        return Packing(use, "f32", True)
    block = stored.tensor.type.block
    aligned = stored.columns.start % block == 0 and stored.columns.stop % block == 0
    return Packing(use, _EXACT[kind] if aligned else "i8", not aligned)


def pack(
    packing: Packing, weights: WeightSource, shard: ShardPlan, packer: _native.Packer, out: _native.Matrix
) -> None:
    """Fill `out` from the weight's stored blocks, or from its floats. What was read of its file is let go."""
    stored = weights.stored(packing.use, shard)
    if packing.through_float or stored is None:
        _pack_floats(weights.float32(packing.use, shard), packer, out)
    else:
        _pack_stored(stored, packer, out)
    if stored is not None:
        stored.tensor.release()


def _pack_floats(values: np.ndarray, packer: _native.Packer, out: _native.Matrix) -> None:
    rows = np.arange(len(values), dtype=np.int64)
    data = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
    packer.pack(TENSOR_TYPES["F32"].code, data, values.shape[1] * 4, 0, rows, out)


def _pack_stored(stored: StoredRows, packer: _native.Packer, out: _native.Matrix) -> None:
    kind = stored.tensor.type
    stride = kind.nbytes(stored.tensor.shape[1])
    offset = kind.nbytes(stored.columns.start)
    rows = np.ascontiguousarray(stored.rows, np.int64)
    packer.pack(kind.code, stored.tensor.data, stride, offset, rows, out)
