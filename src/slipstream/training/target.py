"""TargetParts: what a drafter in training needs of its target as numbers: embedding, last norm, head, last layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.native.packing import Quantization, plan
from slipstream.models import ModelConfig, read_config, record_program
from slipstream.models.weights import ModelWeights
from slipstream.program import KVFormat, ShardPlan
from slipstream.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class TargetParts:
    """All of one target, in the numbers that its file has."""

    config: ModelConfig
    embedding: Tensor
    """[vocabulary, hidden], bfloat16."""
    norm: Tensor
    head: Tensor
    """[vocabulary, hidden], bfloat16; the embedding where the target ties them."""
    layer: dict[str, Tensor]
    """Weights of the last layer: q, k, v, o, gate, up, down, and the norms before attention and MLP; as far as it has
    them.
    """

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> TargetParts:
        """Read them."""
        config = read_config(checkpoint)
        weights, uses = (
            ModelWeights(config, checkpoint),
            record_program(config, max_len=64, kv_format=KVFormat.F32).weights,
        )

        def get(name: str) -> Tensor:
            return torch.from_numpy(weights.float32(uses[name], ShardPlan()).copy())

        embedding = get("embed.weight").to(torch.bfloat16)
        head = get("head.weight").to(torch.bfloat16) if "head.weight" in uses else embedding
        at = f"layers.{config.layers - 1}."
        names = ("q", "k", "v", "o", "gate", "up", "down", "attn_norm", "ffn_norm")
        layer = {name: get(f"{at}{name}.weight") for name in names if f"{at}{name}.weight" in uses}
        return cls(config, embedding, get("norm.weight"), head, layer)

    def logits(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """What the target says of `tokens`, from its last hidden states […, hidden]; float32."""
        normed = F.rms_norm(hidden.float(), hidden.shape[-1:], self.norm, self.config.norm_eps)
        logits = (normed.to(torch.bfloat16) @ self.head[tokens].T).float()
        cap = self.config.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def bytes_served(config: ModelConfig, checkpoint: Checkpoint, quantization: Quantization) -> int:
    """Of the target's weights as a step reads them: its file's, or what its floats are quantised to."""
    if quantization == "none":
        return sum(len(tensor.data) for tensor in checkpoint.tensors.values())
    weights, uses = ModelWeights(config, checkpoint), record_program(config, max_len=64, kv_format=KVFormat.F32).weights
    matrices = (use for use in uses.values() if use.role != "vector")
    return sum(plan(use, weights, ShardPlan(), quantization).nbytes for use in matrices)
