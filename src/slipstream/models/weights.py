"""ModelWeights: a program's weights, cut and ordered, from a checkpoint or from plain arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from slipstream.errors import ModelFileError
from slipstream.models.config import ModelConfig
from slipstream.models.names import Source, locate
from slipstream.models.registry import ARCHITECTURES
from slipstream.program import TENSOR_TYPES, ShardPlan, WeightUse
from slipstream.weights import Checkpoint, StoredTensor

Float32Array = npt.NDArray[np.float32]


class StoredRows(NamedTuple):
    """A matrix as stored: its tensor, which stored rows it takes in which order, and which columns."""

    tensor: StoredTensor
    rows: npt.NDArray[np.int64]
    columns: slice


class WeightSource(Protocol):
    """What a backend loads weights from."""

    def float32(self, use: WeightUse, shard: ShardPlan) -> Float32Array:
        """The weight's numbers, this shard's part, of `use.shape`."""

    def stored(self, use: WeightUse, shard: ShardPlan) -> StoredRows | None:
        """The weight as it lies in a file, or None if there is no file."""


def _part(shape: tuple[int, ...], use: WeightUse, shard: ShardPlan) -> tuple[slice, slice]:
    """(rows, columns) of the whole weight that this shard keeps."""
    rows, columns = slice(0, shape[0]), slice(0, shape[-1])
    if use.shard == "out" or (use.shard != "none" and len(use.shape) == 1):
        rows = slice(shard.rank * use.shape[0], (shard.rank + 1) * use.shape[0])
    elif use.shard == "in":
        columns = slice(shard.rank * use.shape[1], (shard.rank + 1) * use.shape[1])
    return rows, columns


class ArrayWeights:
    """Weights given as whole float arrays by name; for tests and toys."""

    def __init__(self, arrays: Mapping[str, Float32Array]):
        self.arrays = arrays

    def float32(self, use: WeightUse, shard: ShardPlan) -> Float32Array:
        """The weight's numbers, this shard's part."""
        whole = self.arrays[use.name]
        rows, columns = _part(whole.shape, use, shard)
        cut = whole[rows] if whole.ndim == 1 else whole[rows, columns]
        return np.ascontiguousarray(cut, np.float32)

    def stored(self, use: WeightUse, shard: ShardPlan) -> StoredRows | None:
        """None: there is no file."""
        return None


class ModelWeights:
    """Weights of a checkpoint under the program's names."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint):
        self.config, self.checkpoint = config, checkpoint
        self._stored: dict[tuple[WeightUse, ShardPlan], StoredRows] = {}

    def stored(self, use: WeightUse, shard: ShardPlan) -> StoredRows:
        """The weight as it lies in the file. Raises ModelFileError if its shape is not the program's."""
        if (use, shard) not in self._stored:
            self._stored[use, shard] = self._locate(use, shard)
        return self._stored[use, shard]

    def _source(self, name: str) -> tuple[Source, StoredTensor]:
        return locate(self.config, ARCHITECTURES[self.config.architecture].naming, self.checkpoint, name)

    def _locate(self, use: WeightUse, shard: ShardPlan) -> StoredRows:
        source, tensor = self._source(use.name)
        size = shard.size if use.shard != "none" else 1
        expected = list(use.shape)
        if use.shard != "none":
            expected[1 if use.shard == "in" and len(expected) == 2 else 0] *= size
        if tensor.type.name not in TENSOR_TYPES:
            problem = f"holds {tensor.type.name}, which no weight is stored as"
            raise ModelFileError(self.checkpoint.files[0], f"tensor {tensor.name!r}", problem)
        found = (source.rows or tensor.shape[0], *tensor.shape[1:])
        if found != tuple(expected) or source.start + found[0] > tensor.shape[0]:
            raise ModelFileError(
                self.checkpoint.files[0],
                f"tensor {tensor.name!r}",
                f"has shape {list(tensor.shape)}, {use.name} needs {expected}",
            )
        rows, columns = _part(tuple(expected), use, shard)
        return StoredRows(tensor, source.row_order(tensor.shape[0])[rows], columns)

    def float32(self, use: WeightUse, shard: ShardPlan) -> Float32Array:
        """The weight's numbers, this shard's part."""
        source, _ = self._source(use.name)
        tensor, rows, columns = self.stored(use, shard)
        values = tensor.float32()
        values = values[rows] if values.ndim == 1 else values[rows, columns]
        return np.ascontiguousarray(values + np.float32(1) if source.plus_one else values)
