"""The native KV cache: one pair of byte arrays per layer, in the kernels' block layout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.errors import UnsupportedModelError
from slipstream.kernels.native import _native
from slipstream.program import BLOCK_SLOTS, CacheGroup, GroupKind, KVFormat

Bytes = npt.NDArray[np.uint8]
_HEAD_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, each [blocks * bytes per block]; scales [blocks * heads * 32] if int8."""

    k: Bytes
    v: Bytes
    k_scale: npt.NDArray[np.float32] | None
    v_scale: npt.NDArray[np.float32] | None

    @classmethod
    def allocate(cls, group: CacheGroup, blocks: int) -> LayerCache:
        """Zeroed memory; the system commits it as it is written."""
        if group.kind not in (GroupKind.FULL, GroupKind.WINDOW) or group.format is KVFormat.F32:
            raise UnsupportedModelError(
                f"the native backend keeps keys and values in bf16 or int8, not {group.kind}/{group.format}"
            )

        # In small pages: the first tokens would otherwise commit 2 MB for every layer.
        def memory(size: int) -> Bytes:
            return _native.allocate(size, huge_pages=False)

        def numbers(width: int) -> Bytes:
            padded = -(-width // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
            return memory(blocks * group.heads * BLOCK_SLOTS * padded * group.format.bytes)

        def scales() -> npt.NDArray[np.float32] | None:
            if group.format is not KVFormat.INT8:
                return None
            return memory(blocks * group.heads * BLOCK_SLOTS * 4).view(np.float32)

        return cls(numbers(group.k_dim), numbers(group.v_dim), scales(), scales())

    def copy(self, pairs: npt.NDArray[np.int32], blocks: int) -> None:
        """Copy whole blocks, pairs [n, 2] of (from, to)."""
        for array in (self.k, self.v, self.k_scale, self.v_scale):
            if array is not None:
                rows = array.reshape(blocks, -1)
                rows[pairs[:, 1]] = rows[pairs[:, 0]]
