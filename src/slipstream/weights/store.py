"""StoredTensor and Checkpoint: what every reader of weight files hands out."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.program import TensorType
from slipstream.weights.dequantize import dequantize

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in its file. `shape` is row-major; `data` is a view of the mapped bytes [nbytes]."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    data: Bytes

    def float32(self) -> npt.NDArray[np.float32]:
        """The numbers, dequantised, as float32 of `shape`."""
        return dequantize(self.data, self.type).reshape(self.shape)

    def release(self) -> None:
        """Let go of the memory that its mapped pages take until somebody reads them again."""
        root: Any = self.data
        while isinstance(root, np.ndarray):
            root = root.base
        mapped = root.obj if isinstance(root, memoryview) else root
        if isinstance(mapped, mmap.mmap):
            start = self.data.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
            first, end = -(-start // mmap.PAGESIZE), (start + self.data.nbytes) // mmap.PAGESIZE
            if end > first:  # pages at the edges belong to its neighbours, too
                mapped.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk: its files, what they say about it, and its tensors by name.

    `kind` is "gguf" or "safetensors"; `metadata` is GGUF's key-value part or config.json.
    """

    kind: str
    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.data.nbytes for tensor in self.tensors.values())
