"""Stored blocks to float32, in numpy: the oracle for every packed format.

Block layouts are facts of the GGUF format (ggml-quants.h, ggml-common.h); `_unpack_*` turn raw blocks
[n, bytes] into numbers [n, block].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from slipstream.program import TensorType

Bytes = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]

IQ4_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the FP4 (E2M1) numbers, so that they are whole."""


def _half(raw: Bytes) -> Float32Array:
    """float16 columns [n, 2k] bytes as float32 [n, k]."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """[n, b] bytes to [n, 2b]: all low nibbles, then all high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _bits(raw: Bytes) -> Bytes:
    """Little-endian bits of [n, b] bytes as [n, 8b] of 0 or 1."""
    return np.unpackbits(raw, axis=-1, bitorder="little")


def _q4_0(b: Bytes) -> Float32Array:
    return _half(b[:, :2]) * (_nibbles(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b: Bytes) -> Float32Array:
    return _half(b[:, :2]) * _nibbles(b[:, 4:]).astype(np.float32) + _half(b[:, 2:4])


def _q5_0(b: Bytes) -> Float32Array:
    q = _nibbles(b[:, 6:]) | (_bits(b[:, 2:6]) << 4)
    return _half(b[:, :2]) * (q.astype(np.float32) - 16)


def _q5_1(b: Bytes) -> Float32Array:
    q = _nibbles(b[:, 8:]) | (_bits(b[:, 4:8]) << 4)
    return _half(b[:, :2]) * q.astype(np.float32) + _half(b[:, 2:4])


def _q8_0(b: Bytes) -> Float32Array:
    return _half(b[:, :2]) * b[:, 2:].view(np.int8).astype(np.float32)


def _crumbs(raw: Bytes) -> Bytes:
    """[n, 64] bytes to two-bit numbers [n, 256]: per 32 bytes, the four shifts one after the other."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return ((raw.reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(len(raw), 256).astype(np.uint8)


def _spread(scales: Float32Array, width: int) -> Float32Array:
    """Scales [n, k] repeated for `width` numbers each: [n, k * width]."""
    return np.repeat(scales, width, axis=-1)


def _q2_k(b: Bytes) -> Float32Array:
    packed, q = b[:, :16], _crumbs(b[:, 16:80]).astype(np.float32)
    d, dmin = _half(b[:, 80:82]), _half(b[:, 82:84])
    scales, mins = d * (packed & 15).astype(np.float32), dmin * (packed >> 4).astype(np.float32)
    return _spread(scales, 16) * q - _spread(mins, 16)


def _q3_k(b: Bytes) -> Float32Array:
    high = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    q = _crumbs(b[:, 32:96]).astype(np.int8) - 4 * (1 - high.reshape(-1, 256).astype(np.int8))
    packed = b[:, 96:108]
    low = _nibbles(packed[:, :8])
    top = (packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    scales = (low | (top.reshape(-1, 16) << 4)).astype(np.float32) - 32
    return _spread(_half(b[:, 108:110]) * scales, 16) * q.astype(np.float32)


def k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The eight 6-bit scales and eight 6-bit minima in 12 bytes [n, 12] of Q4_K and Q5_K."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return scales, minima


def _k_nibbles(raw: Bytes) -> Bytes:
    """[n, 128] bytes to [n, 256]: per 32 bytes, low nibbles then high ones."""
    return _nibbles(raw.reshape(-1, 32)).reshape(len(raw), 256)


def _scaled_k(b: Bytes, q: Bytes) -> Float32Array:
    scales, minima = k_scales(b[:, 4:16])
    scale = _half(b[:, :2]) * scales.astype(np.float32)
    minimum = _half(b[:, 2:4]) * minima.astype(np.float32)
    return _spread(scale, 32) * q.astype(np.float32) - _spread(minimum, 32)


def _q4_k(b: Bytes) -> Float32Array:
    return _scaled_k(b, _k_nibbles(b[:, 16:]))


def _q5_k(b: Bytes) -> Float32Array:
    high = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _scaled_k(b, (_k_nibbles(b[:, 48:]) | (high.reshape(-1, 256) << 4)).astype(np.uint8))


def _q6_k(b: Bytes) -> Float32Array:
    low, high = b[:, :128].reshape(-1, 2, 64), b[:, 128:192].reshape(-1, 2, 1, 32)
    top = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    q = _nibbles(low).reshape(-1, 256) | (top.reshape(-1, 256) << 4)
    scales = _half(b[:, 208:210]) * b[:, 192:208].view(np.int8).astype(np.float32)
    return _spread(scales, 16) * (q.astype(np.float32) - 32)


def _iq4_nl(b: Bytes) -> Float32Array:
    return _half(b[:, :2]) * IQ4_NL_VALUES[_nibbles(b[:, 2:])].astype(np.float32)


def _mxfp4(b: Bytes) -> Float32Array:
    scale = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128).astype(np.float32)
    return scale * MXFP4_VALUES[_nibbles(b[:, 1:])].astype(np.float32)


def _f32(b: Bytes) -> Float32Array:
    return np.ascontiguousarray(b).view(np.float32)


def _bf16(b: Bytes) -> Float32Array:
    return (np.ascontiguousarray(b).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


_UNPACK: dict[str, Callable[[Bytes], Float32Array]] = {
    "F32": _f32,
    "F16": _half,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
}


def dequantize(data: Bytes, kind: TensorType) -> Float32Array:
    """Raw blocks [bytes] as float32 [numbers]."""
    return _UNPACK[kind.name](data.reshape(-1, kind.bytes)).reshape(-1)
