"""Qwen2, Qwen2.5 (biases on q, k, v) and Qwen3 (norms on q and k): Llama's blocks otherwise."""

from __future__ import annotations

from slipstream.models import read_gguf, read_hf
from slipstream.models.config import Fields, ModelConfig
from slipstream.models.llama import record
from slipstream.weights import Checkpoint

__all__ = ["qwen2_from_gguf", "qwen2_from_hf", "qwen3_from_gguf", "qwen3_from_hf", "record"]


def _windows(f: Fields, layers: int) -> tuple[int | None, ...]:
    if not f.flag("use_sliding_window", False):
        return (None,) * layers
    first = f.integer("max_window_layers", layers)
    return read_hf.windows(f, layers, [layer >= first for layer in range(layers)])


def qwen2_from_hf(f: Fields) -> ModelConfig:
    """Config of Qwen2ForCausalLM."""
    values = read_hf.common(f, "qwen2")
    values["windows"] = _windows(f, values["layers"])
    return ModelConfig(**values | {"qkv_bias": True})


def qwen3_from_hf(f: Fields) -> ModelConfig:
    """Config of Qwen3ForCausalLM."""
    values = read_hf.common(f, "qwen3")
    values["windows"] = _windows(f, values["layers"])
    bias = f.flag("attention_bias", False)
    return ModelConfig(**values | {"qk_norm": True, "qkv_bias": bias, "output_bias": bias})


def qwen2_from_gguf(f: Fields, checkpoint: Checkpoint) -> ModelConfig:
    """Config of the "qwen2" architecture."""
    return ModelConfig(**read_gguf.common(f, checkpoint, "qwen2"))


def qwen3_from_gguf(f: Fields, checkpoint: Checkpoint) -> ModelConfig:
    """Config of the "qwen3" architecture."""
    return ModelConfig(**read_gguf.common(f, checkpoint, "qwen3") | {"qk_norm": True})
