"""Where a program's weights lie in a checkpoint: names, slices of fused tensors, orders of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from slipstream.errors import ModelFileError
from slipstream.weights import Checkpoint, StoredTensor

if TYPE_CHECKING:
    from slipstream.models.config import ModelConfig

HF_LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""A layer's weights: our name, Hugging Face's."""
_HF_FOUR_NORMS = {
    "attn_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
_GGUF_LAYER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "attn_post_norm": "post_attention_norm",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "ffn_post_norm": "post_ffw_norm",
}


@dataclass(frozen=True, slots=True)
class Source:
    """One weight's place: rows [start, start + rows) of `tensor` (all, if rows is 0).

    `pair_heads` > 0: the rows of each of that many heads are stored in rotary pairs and have to be
    taken in halves. `plus_one`: the stored norm weight is an offset from 1.
    """

    tensor: str
    start: int = 0
    rows: int = 0
    pair_heads: int = 0
    plus_one: bool = False

    def row_order(self, total: int) -> npt.NDArray[np.int64]:
        """Stored row of each row of the weight; `total` is the stored tensor's row count."""
        order = np.arange(self.start, self.start + (self.rows or total))
        if not self.pair_heads:
            return order
        return order.reshape(self.pair_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def locate(config: ModelConfig, checkpoint: Checkpoint, name: str) -> tuple[Source, StoredTensor]:
    """The source of the program's weight `name`. Raises ModelFileError if the file lacks it."""
    source = _gguf_source(config, name) if checkpoint.kind == "gguf" else _hf_source(config, checkpoint, name)
    tensor = checkpoint.tensors.get(source.tensor)
    if tensor is None:
        raise ModelFileError(checkpoint.files[0], f"tensor {source.tensor!r}", "is missing")
    return source, tensor


def _split(name: str) -> tuple[int | None, str, str]:
    """("layers.3.q.weight") -> (3, "q", "weight"); ("norm.weight") -> (None, "norm", "weight")."""
    parts = name.split(".")
    if parts[0] == "layers":
        return int(parts[1]), parts[2], parts[3]
    return None, parts[0], parts[1]


def _fused(config: ModelConfig, part: str) -> tuple[str, Source] | None:
    """Phi-3 keeps q, k, v in one tensor and gate, up in another."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    places = {
        "q": ("qkv", 0, q),
        "k": ("qkv", q, kv),
        "v": ("qkv", q + kv, kv),
        "gate": ("gate_up", 0, config.ffn),
        "up": ("gate_up", config.ffn, config.ffn),
    }
    if config.architecture != "phi3" or part not in places:
        return None
    tensor, start, rows = places[part]
    return tensor, Source(tensor, start, rows)


def _gguf_source(config: ModelConfig, name: str) -> Source:
    layer, part, kind = _split(name)
    if layer is None:
        stem = {"embed": "token_embd", "head": "output", "norm": "output_norm"}[part]
        return Source(f"{stem}.{kind}")
    fused = _fused(config, part)
    if fused:
        stem = {"qkv": "attn_qkv", "gate_up": "ffn_up"}[fused[0]]
        return replace(fused[1], tensor=f"blk.{layer}.{stem}.{kind}")
    pair_heads = 0
    if config.architecture in ("llama", "mistral"):
        pair_heads = {"q": config.heads, "k": config.kv_heads}.get(part, 0)
    return Source(f"blk.{layer}.{_GGUF_LAYER[part]}.{kind}", pair_heads=pair_heads)


def _hf_source(config: ModelConfig, checkpoint: Checkpoint, name: str) -> Source:
    layer, part, kind = _split(name)
    prefix = next(
        (p for p in ("model.language_model.", "language_model.model.", "model.", "")
         if f"{p}embed_tokens.weight" in checkpoint.tensors),
        "model.",
    )  # fmt: skip
    plus_one = config.architecture in ("gemma2", "gemma3") and part.endswith("norm")
    if layer is None:
        if part == "head":
            root = prefix.removesuffix("model.") if prefix.endswith(".model.") else ""
            return Source(f"{root}lm_head.{kind}")
        stem = {"embed": "embed_tokens", "norm": "norm"}[part]
        return Source(f"{prefix}{stem}.{kind}", plus_one=plus_one)
    fused = _fused(config, part)
    if fused:
        stem = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}[fused[0]]
        return replace(fused[1], tensor=f"{prefix}layers.{layer}.{stem}.{kind}")
    names = HF_LAYER | _HF_FOUR_NORMS if config.post_norms else HF_LAYER
    return Source(f"{prefix}layers.{layer}.{names[part]}.{kind}", plus_one=plus_one)
