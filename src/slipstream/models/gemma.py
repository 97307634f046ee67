"""Gemma 2 and 3: four norms a layer, local and global layers, scaled embeddings, soft caps or q/k norms."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.models import blocks, read_gguf, read_hf
from slipstream.models.config import Fields, ModelConfig
from slipstream.models.names import Naming
from slipstream.models.rope import RopeConfig
from slipstream.program import Recorder
from slipstream.weights import Checkpoint

NAMING = Naming(
    hf={
        "attn_post_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    },
    norms_from_one=True,
)
GEMMA2_PATTERN = 2
GEMMA3_PATTERN = 6
GEMMA2 = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3 = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e6,
}
"""What their config.json may leave out, and Google's own do."""
LOCAL_THETA = 10_000.0
"""Gemma 3's local layers keep this base; older GGUF files do not say so."""


def _shared(values: dict[str, Any]) -> dict[str, Any]:
    return values | {"post_norms": True, "embed_scale": float(values["hidden"]) ** 0.5}


def _pattern(layers: int, every: int, window: int) -> tuple[int | None, ...]:
    """Every `every`-th layer is global, the others have the window."""
    return tuple(None if (layer + 1) % every == 0 else window for layer in range(layers))


def _from_hf(text: Fields, architecture: str, every: int) -> dict[str, Any]:
    values = read_hf.common(text, architecture, act="hidden_activation", usual_act="gelu_pytorch_tanh")
    local = [(layer + 1) % every != 0 for layer in range(values["layers"])]
    return _shared(values) | {
        "windows": read_hf.windows(text, values["layers"], local),
        "attention_scale": text.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "tied_head": text.flag("tie_word_embeddings", True),
        "attention_softcap": text.optional_number("attn_logit_softcapping"),
        "final_softcap": text.optional_number("final_logit_softcapping"),
    }


def gemma2_from_hf(f: Fields) -> ModelConfig:
    """Config of Gemma2ForCausalLM."""
    return ModelConfig(**_from_hf(f.with_defaults(GEMMA2), "gemma2", GEMMA2_PATTERN))


def gemma3_from_hf(f: Fields) -> ModelConfig:
    """Config of Gemma3ForCausalLM, and of the text part of Gemma3ForConditionalGeneration."""
    f.only("quantization_config")
    text = (f.section("text_config") if "text_config" in f else f).with_defaults(GEMMA3)
    text.only("attn_logit_softcapping")  # transformers ignores it
    every = text.integer("sliding_window_pattern", GEMMA3_PATTERN)
    if every < 1:
        raise text.fail("sliding_window_pattern", f"{every} is not positive")
    values = _from_hf(text, "gemma3", every)
    local = read_hf.rope(text, values["head_dim"], "sliding_attention", "rope_local_base_freq")
    local = read_hf.whole_heads(text, local, values["head_dim"])
    return ModelConfig(**values | {"qk_norm": True, "local_rope": local})


def _gguf_windows(f: Fields, layers: int, every: int, window: int) -> tuple[int | None, ...]:
    """By the file's pattern if it has one: how often a layer is global, or of each layer whether it is local."""
    key = "attention.sliding_window_pattern"
    pattern = f.get(key, every)
    if isinstance(pattern, np.ndarray) and pattern.dtype == np.bool_ and len(pattern) == layers:
        return tuple(window if local else None for local in pattern)
    if not isinstance(pattern, int) or pattern < 1:
        raise f.fail(key, f"is neither a positive number nor a list of {layers} flags")
    return _pattern(layers, pattern, window)


def _gguf_scale(values: dict[str, Any], layers_of_27b: int) -> float:
    """The 27B models scale by hidden / heads instead of the head's width; the file does not say so."""
    large = values["layers"] == layers_of_27b
    return float((values["hidden"] / values["heads"] if large else values["head_dim"]) ** -0.5)


def gemma2_from_gguf(f: Fields, checkpoint: Checkpoint) -> ModelConfig:
    """Config of the "gemma2" architecture."""
    values = read_gguf.common(f, checkpoint, "gemma2")
    window = f.integer("attention.sliding_window", 4096)
    values = _shared(values) | {
        "activation": "gelu_tanh",
        "windows": _gguf_windows(f, values["layers"], GEMMA2_PATTERN, window),
        "attention_scale": _gguf_scale(values, 46),
        "attention_softcap": f.number("attn_logit_softcapping", 50.0),
        "final_softcap": f.number("final_logit_softcapping", 30.0),
    }
    return ModelConfig(**values)


def gemma3_from_gguf(f: Fields, checkpoint: Checkpoint) -> ModelConfig:
    """Config of the "gemma3" architecture."""
    values = read_gguf.common(f, checkpoint, "gemma3")
    window = f.integer("attention.sliding_window")
    values = _shared(values) | {
        "activation": "gelu_tanh",
        "windows": _gguf_windows(f, values["layers"], GEMMA3_PATTERN, window),
        "attention_scale": _gguf_scale(values, 62),
        "final_softcap": f.optional_number("final_logit_softcapping"),
        "qk_norm": True,
        "local_rope": RopeConfig(values["rope"].dim, f.number("rope.freq_base_swa", LOCAL_THETA)),
    }
    return ModelConfig(**values)


def record(p: Recorder, c: ModelConfig, max_len: int) -> None:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""
    x = blocks.embed(p, c)
    for layer in range(c.layers):
        at = f"layers.{layer}"
        p.tap(x, layer)
        h = blocks.norm(p, c, x, f"{at}.attn_norm")
        h = blocks.attention(p, c, layer, h, max_len)
        x = p.add(x, blocks.norm(p, c, h, f"{at}.attn_post_norm") if c.post_norms else h)
        h = blocks.norm(p, c, x, f"{at}.ffn_norm")
        h = blocks.mlp(p, c, layer, h)
        x = p.add(x, blocks.norm(p, c, h, f"{at}.ffn_post_norm") if c.post_norms else h)
    blocks.head(p, c, x)
