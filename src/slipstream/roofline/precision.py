"""Precision: bits per stored number, scales included, and the arithmetic that goes with it."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import UsageError
from slipstream.roofline.hardware import Arithmetic


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights are stored: mean bits a weight, by part, and what multiplies them."""

    name: str
    bits: float
    arithmetic: Arithmetic = "bf16"
    head_bits: float | None = None
    embedding_bits: float | None = None

    @property
    def head(self) -> float:
        """Bits of a weight of the head."""
        return self.bits if self.head_bits is None else self.head_bits

    @property
    def embedding(self) -> float:
        """Bits of a number of the embedding table."""
        return self.bits if self.embedding_bits is None else self.embedding_bits


_WEIGHTS: dict[str, tuple[float, Arithmetic]] = {
    "f32": (32, "f32"),
    "fp32": (32, "f32"),
    "bf16": (16, "bf16"),
    "fp16": (16, "bf16"),
    "f16": (16, "bf16"),
    "fp8": (8, "fp8"),
    "int8": (8.5, "int8"),
    "q8_0": (8.5, "int8"),
    "q6_k": (6.5625, "int8"),
    "q5_k": (5.5, "int8"),
    "q5_0": (5.5, "int8"),
    "q4_k": (4.5, "int8"),
    "q4_0": (4.5, "int8"),
    "q4_1": (5.0, "int8"),
    "q3_k": (3.4375, "int8"),
    "q2_k": (2.625, "int8"),
    "int4": (4.5, "int8"),
    "int4-g128": (4.125, "bf16"),
    "nvfp4": (4.5, "fp4"),
    "mxfp4": (4.25, "fp4"),
}
"""Bits with their scales: GGUF types by their block sizes, int8 and int4 with a float16 scale per 32 weights,
int4-g128 per 128, nvfp4 an 8-bit scale per 16, mxfp4 per 32."""

WEIGHT_PRECISIONS = tuple(_WEIGHTS)

KV_BITS = {"f32": 32.0, "bf16": 16.0, "fp16": 16.0, "auto": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.0}
"""Bits of a cached number, without scales."""


def find_precision(name: str) -> Precision:
    """A weight precision by name. Raises UsageError."""
    key = name.lower()
    if key not in _WEIGHTS:
        raise UsageError(f"no precision {name!r}; known: {', '.join(_WEIGHTS)}")
    bits, arithmetic = _WEIGHTS[key]
    return Precision(key, bits, arithmetic)


def kv_bits(name: str) -> float:
    """Bits of a cached number by the format's name. Raises UsageError."""
    if name.lower() not in KV_BITS:
        raise UsageError(f"no KV precision {name!r}; known: {', '.join(KV_BITS)}")
    return KV_BITS[name.lower()]
