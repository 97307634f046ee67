"""Phi-3 and Phi-4-mini: Llama's blocks with fused projections on disk and longrope."""

from __future__ import annotations

from slipstream.errors import UnsupportedModelError
from slipstream.models import read_gguf, read_hf
from slipstream.models.config import Fields, ModelConfig
from slipstream.models.llama import record
from slipstream.models.names import Fused, Naming
from slipstream.weights import Checkpoint

__all__ = ["NAMING", "from_gguf", "from_hf", "record"]

NAMING = Naming(
    fused=(
        Fused(("q", "k", "v"), hf="self_attn.qkv_proj", gguf="attn_qkv"),
        Fused(("gate", "up"), hf="mlp.gate_up_proj", gguf="ffn_up"),
    )
)

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
"""What its config.json may leave out."""


def from_hf(f: Fields) -> ModelConfig:
    """Config of Phi3ForCausalLM."""
    f = f.with_defaults(DEFAULTS)
    values = read_hf.common(f, "phi3", part_of_heads=True)
    if values["rope"].kind not in ("none", "longrope"):
        raise UnsupportedModelError(f"{f.path}: rope scaling {values['rope'].kind!r} is not supported for Phi-3")
    sliding = "sliding_window" in f
    values["windows"] = read_hf.windows(f, values["layers"], [sliding] * values["layers"])
    return ModelConfig(**values)


def from_gguf(f: Fields, checkpoint: Checkpoint) -> ModelConfig:
    """Config of the "phi3" architecture."""
    values = read_gguf.common(f, checkpoint, "phi3")
    if f.get("attention.sliding_window"):
        values["windows"] = (f.integer("attention.sliding_window"),) * values["layers"]
    return ModelConfig(**values)
