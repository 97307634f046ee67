"""The native KV cache: one piece of memory, block after block; a block holds its tokens of all layers.

So a block is copied, saved or restored in one piece, and huge pages can be used: the first tokens commit one of them
and not one for every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.errors import UnsupportedModelError
from slipstream.kernels.native import _native
from slipstream.program import BLOCK_SLOTS, CacheGroup, CacheSpec, GroupKind, KVFormat

Bytes = npt.NDArray[np.uint8]
_HEAD_MULTIPLE, _LINE = 32, 64


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where in a block a layer's keys, values and (int8 only) their scales lie: bytes from its start."""

    k: int
    v: int
    k_scale: int
    v_scale: int
    int8: bool


@dataclass(frozen=True, slots=True)
class CacheArena:
    """Zeroed memory of `blocks` blocks that the system commits as it is written, and each layer's place in one.

    Steps use all but the last `spare` blocks, which hold what was moved out of the way.
    """

    data: Bytes
    block_bytes: int
    blocks: int
    spare: int
    places: dict[tuple[int, int], LayerPlace]

    @classmethod
    def allocate(cls, spec: CacheSpec, blocks: int, spare: int = 0) -> CacheArena:
        """Room for `blocks` blocks and `spare` more. Raises UnsupportedModelError for groups that have no kernel."""
        places, at = {}, 0
        for index, group in enumerate(spec):
            for layer in range(group.layers):
                places[index, layer], at = _place(group, at)
        return cls(_native.allocate((blocks + spare) * at), at, blocks + spare, spare, places)

    def touch(self, blocks: npt.NDArray[np.int32]) -> None:
        """Write over blocks: memory that was never written reads as one page of zeros, and much too fast."""
        self.data.reshape(-1, self.block_bytes)[blocks] = 0

    def decommit(self) -> None:
        """Give all memory back to the system until it is written again."""
        _native.decommit(self.data)


def _place(group: CacheGroup, at: int) -> tuple[LayerPlace, int]:
    """A layer's place from byte `at` of a block, and where the next one begins."""
    if group.kind not in (GroupKind.FULL, GroupKind.WINDOW, GroupKind.DRAFTER) or group.format is KVFormat.F32:
        raise UnsupportedModelError(
            f"the native backend keeps keys and values in bf16 or int8, not {group.kind}/{group.format}"
        )
    int8 = group.format is KVFormat.INT8

    def numbers(width: int) -> int:
        return group.heads * BLOCK_SLOTS * -(-width // _HEAD_MULTIPLE) * _HEAD_MULTIPLE * group.format.bytes

    scales = group.heads * BLOCK_SLOTS * 4 if int8 else 0
    offsets = [at]
    for size in (numbers(group.k_dim), numbers(group.v_dim), scales, scales):
        offsets.append(-(-(offsets[-1] + size) // _LINE) * _LINE)
    k, v, k_scale, v_scale, end = offsets
    return LayerPlace(k, v, k_scale, v_scale, int8), end
