"""Where a program's weights lie in a checkpoint: names, slices of fused tensors, orders of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
class Fused:
    """Several weights of a layer in one tensor, one after another, and what it is called."""

    parts: tuple[str, ...]
    hf: str
    gguf: str


@dataclass(frozen=True, slots=True)
class Naming:
    """What an architecture stores otherwise than most do."""

    hf: Mapping[str, str] = field(default_factory=dict)
    """A layer's weights that Hugging Face calls something else than HF_LAYER says."""
    fused: tuple[Fused, ...] = ()
    rotary_pairs: bool = False
    """GGUF keeps the rows of q and k in the order of rotary pairs."""
    norms_from_one: bool = False
    """Hugging Face's norm weights are offsets from 1."""


USUAL = Naming()
"""Llama's names as everybody took them over, its rotary pairs not."""


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


def locate(config: ModelConfig, naming: Naming, checkpoint: Checkpoint, name: str) -> tuple[Source, StoredTensor]:
    """The source of the program's weight `name`. Raises ModelFileError if the file lacks it."""
    if checkpoint.kind == "gguf":
        source = _gguf_source(config, naming, name)
    else:
        source = _hf_source(config, naming, checkpoint, name)
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


def _fused(config: ModelConfig, naming: Naming, part: str) -> tuple[Fused, int, int] | None:
    """The tensor that has the part among others, and which rows of it that is: (tensor, start, rows)."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    rows = {"q": q, "k": kv, "v": kv, "gate": config.ffn, "up": config.ffn}
    for fused in naming.fused:
        if part in fused.parts:
            before = fused.parts[: fused.parts.index(part)]
            return fused, sum(rows[other] for other in before), rows[part]
    return None


def _gguf_source(config: ModelConfig, naming: Naming, name: str) -> Source:
    layer, part, kind = _split(name)
    if layer is None:
        stem = {"embed": "token_embd", "head": "output", "norm": "output_norm"}[part]
        return Source(f"{stem}.{kind}")
    found = _fused(config, naming, part)
    if found:
        fused, start, rows = found
        return Source(f"blk.{layer}.{fused.gguf}.{kind}", start, rows)
    pair_heads = {"q": config.heads, "k": config.kv_heads}.get(part, 0) if naming.rotary_pairs else 0
    return Source(f"blk.{layer}.{_GGUF_LAYER[part]}.{kind}", pair_heads=pair_heads)


def _hf_source(config: ModelConfig, naming: Naming, checkpoint: Checkpoint, name: str) -> Source:
    layer, part, kind = _split(name)
    prefix = next(
        (p for p in ("model.language_model.", "language_model.model.", "model.", "")
         if f"{p}embed_tokens.weight" in checkpoint.tensors),
        "model.",
    )  # fmt: skip
    plus_one = naming.norms_from_one and part.endswith("norm")
    if layer is None:
        if part == "head":
            root = prefix.removesuffix("model.") if prefix.endswith(".model.") else ""
            return Source(f"{root}lm_head.{kind}")
        stem = {"embed": "embed_tokens", "norm": "norm"}[part]
        return Source(f"{prefix}{stem}.{kind}", plus_one=plus_one)
    found = _fused(config, naming, part)
    if found:
        fused, start, rows = found
        return Source(f"{prefix}layers.{layer}.{fused.hf}.{kind}", start, rows)
    return Source(f"{prefix}layers.{layer}.{naming.hf.get(part) or HF_LAYER[part]}.{kind}", plus_one=plus_one)
