"""What drafters' checkpoints have in common: how to tell layouts apart, their weights under a program's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from slipstream.errors import ModelFileError, UnsupportedModelError
from slipstream.models.config import Fields
from slipstream.models.weights import StoredRows, WeightSource
from slipstream.program import TENSOR_TYPES, ShardPlan, WeightUse
from slipstream.weights import Checkpoint

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Family = Literal["eagle3", "dspark"]

EMBEDDING = "embed.weight"
_DSPARK = ("DSparkDraftModel", "Qwen3DSparkModel", "Gemma4DSparkModel")


def family_of(checkpoint: Checkpoint) -> Family:
    """Which drafter a checkpoint holds. Raises UnsupportedModelError if it is none that is known."""
    config = checkpoint.metadata
    named = config.get("speculators_model_type")
    if named in ("eagle3", "dspark"):
        return "eagle3" if named == "eagle3" else "dspark"
    names = config.get("architectures") or []
    if any(name in _DSPARK for name in names):
        return "dspark"
    heads = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
    if "fc.weight" in checkpoint.tensors and any(head in checkpoint.tensors for head in heads):
        return "eagle3"
    what = str(named or (names[0] if names else "no architecture"))[:60]
    raise UnsupportedModelError(
        f"{checkpoint.files[0].parent}: {what!r} is no drafter that is known: EAGLE-3 or DSpark"
    )


def layer_ids(fields: Fields, key: str, layers: int) -> tuple[int, ...] | None:
    """A list of layer numbers, each from -1 to `layers`; None if it is missing. Raises ModelFileError."""
    values = fields.get(key)
    if values is None:
        return None
    if not isinstance(values, list) or not values or len(values) > layers + 2:
        raise fields.fail(key, "is not a list of layers")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= layers:
            raise fields.fail(key, f"has {value!r}, which is no layer of a target of {layers}")
    return tuple(values)


def token_map(checkpoint: Checkpoint, count: int, vocabulary: int) -> Int32Array | None:
    """Tokens that the head's rows stand for, from the offsets `d2t`; None: the rows' own numbers."""
    tensor = checkpoint.tensors.get("d2t")
    if tensor is None:
        if count != vocabulary:
            raise ModelFileError(checkpoint.files[0], "tensor 'd2t'", f"is missing for {count} of {vocabulary} tokens")
        return None
    if tensor.type.name != "I64" or tensor.shape != (count,):
        raise ModelFileError(checkpoint.files[0], "tensor 'd2t'", f"is not {count} whole numbers of 64 bits")
    offsets = np.frombuffer(tensor.data.tobytes(), np.int64)
    tokens = offsets + np.arange(len(offsets))
    if (np.diff(tokens) <= 0).any() or tokens[0] < 0 or tokens[-1] >= vocabulary:
        raise ModelFileError(checkpoint.files[0], "tensor 'd2t'", f"does not name {count} tokens of {vocabulary}")
    return None if count == vocabulary else tokens.astype(np.int32)


class DrafterWeights:
    """A drafter's weights under its program's names.

    `names` are tensors of the checkpoint, `made` arrays that are not stored as such; what is in neither is the
    target's.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Mapping[str, str],
        made: Mapping[str, Float32Array] | None = None,
        target: WeightSource | None = None,
    ):
        self._checkpoint, self._names, self._made, self._target = checkpoint, names, made or {}, target

    def has(self, name: str) -> bool:
        """Whether a weight is the drafter's own."""
        return name in self._made or name in self._names

    def stored(self, use: WeightUse, shard: ShardPlan) -> StoredRows | None:
        """The weight as it lies in the file, or None if it is made."""
        if use.name in self._made:
            return None
        if use.name not in self._names:
            return self._of_target(use).stored(use, shard)
        tensor = self._checkpoint.tensors.get(self._names[use.name])
        if tensor is None:
            raise ModelFileError(self._checkpoint.files[0], f"tensor {self._names[use.name]!r}", "is missing")
        if tensor.shape != use.shape or tensor.type.name not in TENSOR_TYPES:
            problem = f"is {tensor.type.name} {list(tensor.shape)}, expected numbers {list(use.shape)}"
            raise ModelFileError(self._checkpoint.files[0], f"tensor {tensor.name!r}", problem)
        return StoredRows(tensor, np.arange(use.shape[0]), slice(0, use.shape[-1]))

    def float32(self, use: WeightUse, shard: ShardPlan) -> Float32Array:
        """The weight's numbers."""
        if use.name in self._made:
            return self._made[use.name]
        if use.name not in self._names:
            return self._of_target(use).float32(use, shard)
        stored = self.stored(use, shard)
        assert stored is not None
        return np.ascontiguousarray(stored.tensor.float32())

    def _of_target(self, use: WeightUse) -> WeightSource:
        if self._target is None:
            raise ModelFileError(self._checkpoint.files[0], use.name, "is neither in the file nor the target's")
        return self._target


def named_layers(
    checkpoint: Checkpoint, prefixes: Sequence[str], parts: Mapping[str, str], biases: bool = True
) -> dict[str, str]:
    """Names of the weights of layers whose tensors begin with `prefixes`; biases where the file has them."""
    names = {}
    for layer, prefix in enumerate(prefixes):
        for mine, theirs in parts.items():
            for kind in ("weight", "bias"):
                if kind == "weight" or (biases and f"{prefix}{theirs}.bias" in checkpoint.tensors):
                    names[f"layers.{layer}.{mine}.{kind}"] = f"{prefix}{theirs}.{kind}"
    return names
