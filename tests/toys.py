"""Small model configs with every feature that the native kernels treat specially."""

from __future__ import annotations

from dataclasses import replace

from slipstream.models import ModelConfig
from slipstream.models.rope import RopeConfig

VOCABULARY = 131

PLAIN = ModelConfig(
    architecture="llama",
    layers=2,
    hidden=96,
    heads=6,
    kv_heads=2,
    head_dim=16,
    ffn=160,
    vocabulary=VOCABULARY,
    context=2048,
    norm_eps=1e-5,
    rope=RopeConfig(16),
    windows=(None, None),
    tied_head=True,
    qkv_bias=True,
    attention_scale=0.8,
)
"""Odd widths, grouped heads, biases, a tied head; attention sharp enough to matter."""

WINDOWED = ModelConfig(
    architecture="gemma3",
    layers=3,
    hidden=64,
    heads=4,
    kv_heads=1,
    head_dim=48,
    ffn=128,
    vocabulary=VOCABULARY,
    context=2048,
    norm_eps=1e-6,
    rope=RopeConfig(48, 1e6),
    local_rope=RopeConfig(48),
    windows=(300, None, 40),
    tied_head=True,
    qk_norm=True,
    post_norms=True,
    activation="gelu_tanh",
    attention_softcap=20.0,
    final_softcap=30.0,
    embed_scale=8.0,
)
"""Four norms, q/k norms, two windows, soft caps, one key-value head."""

NARROW = replace(WINDOWED, layers=1, windows=(2,))
"""A row sees itself and the one before, and there is no second layer to see further."""

WIDE = ModelConfig(
    architecture="llama",
    layers=1,
    hidden=256,
    heads=2,
    kv_heads=2,
    head_dim=128,
    ffn=512,
    vocabulary=VOCABULARY,
    context=2048,
    norm_eps=1e-5,
    rope=RopeConfig(128),
    windows=(None,),
)
"""Widths that are multiples of 256, for the K-quants."""
