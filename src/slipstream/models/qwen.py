"""Qwen2, Qwen2.5 (biases on q, k, v) and Qwen3 (norms on q and k): Llama's blocks otherwise."""

from __future__ import annotations

from typing import Any

from slipstream.models import read_gguf, read_hf
from slipstream.models.config import Fields, ModelConfig
from slipstream.models.llama import record
from slipstream.weights import Checkpoint

__all__ = ["qwen2_from_gguf", "qwen2_from_hf", "qwen3_from_gguf", "qwen3_from_hf", "record"]


QWEN2 = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_position_embeddings": 32_768,
}
QWEN3 = QWEN2 | {"head_dim": 128}
"""What their config.json may leave out."""


def _common(f: Fields, architecture: str) -> dict[str, Any]:
    values = read_hf.common(f, architecture)
    layers, sliding, first = values["layers"], f.flag("use_sliding_window", False), f.integer("max_window_layers", 28)
    windows = read_hf.windows(f, layers, [sliding and layer >= first for layer in range(layers)])
    if any(windows) and not sliding:
        raise f.fail("use_sliding_window", "is false, but layer_types has layers with a window")
    return values | {"windows": windows}


def qwen2_from_hf(f: Fields) -> ModelConfig:
    """Config of Qwen2ForCausalLM."""
    return ModelConfig(**_common(f.with_defaults(QWEN2), "qwen2") | {"qkv_bias": True, "output_bias": False})


def qwen3_from_hf(f: Fields) -> ModelConfig:
    """Config of Qwen3ForCausalLM."""
    return ModelConfig(**_common(f.with_defaults(QWEN3), "qwen3") | {"qk_norm": True})


def qwen2_from_gguf(f: Fields, checkpoint: Checkpoint) -> ModelConfig:
    """Config of the "qwen2" architecture."""
    return ModelConfig(**read_gguf.common(f, checkpoint, "qwen2"))


def qwen3_from_gguf(f: Fields, checkpoint: Checkpoint) -> ModelConfig:
    """Config of the "qwen3" architecture."""
    return ModelConfig(**read_gguf.common(f, checkpoint, "qwen3") | {"qk_norm": True})
