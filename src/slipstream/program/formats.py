"""Tensor types as they lie in model files: how many numbers a stored block holds, in how many bytes."""

from __future__ import annotations

from typing import NamedTuple


class TensorType(NamedTuple):
    """A storage type. `code` is GGUF's number for it (facts: ggml.h)."""

    name: str
    code: int
    block: int
    bytes: int

    def nbytes(self, numbers: int) -> int:
        """Bytes of `numbers` stored numbers; they must fill whole blocks."""
        return numbers // self.block * self.bytes


_TABLE = (
    TensorType("F32", 0, 1, 4),
    TensorType("F16", 1, 1, 2),
    TensorType("Q4_0", 2, 32, 18),
    TensorType("Q4_1", 3, 32, 20),
    TensorType("Q5_0", 6, 32, 22),
    TensorType("Q5_1", 7, 32, 24),
    TensorType("Q8_0", 8, 32, 34),
    TensorType("Q2_K", 10, 256, 84),
    TensorType("Q3_K", 11, 256, 110),
    TensorType("Q4_K", 12, 256, 144),
    TensorType("Q5_K", 13, 256, 176),
    TensorType("Q6_K", 14, 256, 210),
    TensorType("IQ4_NL", 20, 32, 18),
    TensorType("BF16", 30, 1, 2),
    TensorType("MXFP4", 39, 32, 17),
)

TENSOR_TYPES = {entry.name: entry for entry in _TABLE}
TENSOR_TYPES_BY_CODE = {entry.code: entry for entry in _TABLE}
