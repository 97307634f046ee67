"""Paged state in numpy: keys and values through their stored format, recurrent states."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream.program import BLOCK_SLOTS, CacheGroup, GroupKind, KVFormat

Float32Array = npt.NDArray[np.float32]


def round_bf16(x: Float32Array) -> Float32Array:
    """x rounded to bfloat16 (to nearest, ties to even), still float32. Finite numbers only."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def stored(x: Float32Array, kv_format: KVFormat) -> Float32Array:
    """Heads x [..., width] as they come back from the cache; int8 has one scale per head."""
    match kv_format:
        case KVFormat.F32:
            return x
        case KVFormat.BF16:
            return round_bf16(x)
        case KVFormat.INT8:
            peak = np.abs(x).max(-1, keepdims=True)
            inverse = np.divide(127, peak, out=np.zeros_like(peak), where=peak > 0)
            return np.rint(x * inverse).astype(np.float32) * (peak / np.float32(127))


class GroupCache:
    """One group's state: k, v of shape [layers, slots, heads, width], or states [layers, slots, width]."""

    def __init__(self, group: CacheGroup, blocks: int):
        self.group = group
        slots = blocks * BLOCK_SLOTS
        shape = (group.layers, slots, group.heads)
        if group.kind is GroupKind.RECURRENT:
            self.state = np.zeros((group.layers, slots, group.heads * group.k_dim), np.float32)
        else:
            self.k = np.zeros((*shape, group.k_dim), np.float32)
            self.v = np.zeros((*shape, group.v_dim), np.float32)

    def write(self, layer: int, slots: npt.NDArray[np.int32], k: Float32Array, v: Float32Array) -> None:
        """Store keys [rows, heads * k_dim] and values [rows, heads * v_dim]."""
        heads, kv_format = self.group.heads, self.group.format
        self.k[layer, slots] = stored(k.reshape(len(k), heads, -1), kv_format)
        if self.group.v_dim:
            self.v[layer, slots] = stored(v.reshape(len(v), heads, -1), kv_format)

    def values(self, layer: int, slots: npt.NDArray[np.int64]) -> Float32Array:
        """Values at `slots`; a latent group's are its keys."""
        return (self.v if self.group.v_dim else self.k)[layer, slots]

    @property
    def _arrays(self) -> list[Float32Array]:
        return [self.state] if self.group.kind is GroupKind.RECURRENT else [self.k, self.v]

    def copy_slots(self, pairs: npt.NDArray[np.int32]) -> None:
        """Copy single slots, pairs [n, 2] of (from, to), one after the other."""
        for array in self._arrays:
            for source, to in pairs:
                array[:, to] = array[:, source]

    def copy(self, pairs: npt.NDArray[np.int32]) -> None:
        """Copy whole blocks, pairs [n, 2] of (from, to)."""
        for array in self._arrays:
            blocks = array.reshape(array.shape[0], -1, BLOCK_SLOTS, *array.shape[2:])
            blocks[:, pairs[:, 1]] = blocks[:, pairs[:, 0]]
