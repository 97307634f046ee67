"""What an EAGLE-3 drafter is: its config in three layouts, its weights, and its program.

Layouts: SafeAILab/EAGLE (the paper's), SpecForge, speculators. Facts were taken from their code (SafeAILab/EAGLE
cb7e084, sgl-project/SpecForge a6b6b02, vllm-project/speculators c05b95b); the tests hold what their code computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.errors import UnsupportedModelError
from slipstream.models import read_hf
from slipstream.models.config import Fields
from slipstream.models.names import HF_LAYER
from slipstream.models.rope import RopeConfig
from slipstream.models.weights import WeightSource
from slipstream.program import CacheGroup, CacheSpec, GroupKind, KVFormat, Program, Recorder
from slipstream.program.ops import Value
from slipstream.speculation.checkpoint import (
    EMBEDDING,
    DrafterWeights,
    Int32Array,
    layer_ids,
    named_layers,
    token_map,
)
from slipstream.weights import Checkpoint

HIDDEN = "hidden"
"""The tap that is fed back into the next pass."""
MOST_LAYERS = 16


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 drafter. `taps` are the target's layers whose inputs it reads; `tap_width` is that of one of them."""

    taps: tuple[int, ...]
    tap_width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    draft_vocabulary: int
    norm_eps: float
    rope: RopeConfig
    window: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    residual_normed: bool = False
    """The first layer's residual is the normed hidden state (norm_before_residual)."""
    fed_normed: bool = False
    """What is fed back is normed (norm_output)."""
    input_norm: bool = False
    """All taps are normed together before they are joined (norm_before_fc)."""
    tap_norms: bool = False
    """Each tap is normed by itself before they are joined (fc_norm)."""


def default_taps(layers: int) -> tuple[int, ...]:
    """The paper's: inputs of layers 2, n / 2 and n - 3."""
    return tuple(sorted({2, layers // 2, layers - 3}))


def read_eagle3(checkpoint: Checkpoint, target_layers: int, target_hidden: int) -> Eagle3Config:
    """The config, whichever layout it is in. Raises SlipstreamError for one that is damaged or not supported."""
    f = Fields(checkpoint.files[0].parent / "config.json", checkpoint.metadata)
    speculators = "speculators_model_type" in f
    model = f.section("transformer_layer_config") if speculators else f
    values = _shape(model, checkpoint)
    flags: dict[str, Any] = {
        "residual_normed": f.flag("norm_before_residual", False),
        "fed_normed": f.flag("norm_output", False),
        "tap_norms": f.flag("fc_norm", False),
        "input_norm": f.flag("norm_before_fc", False),
    }
    if speculators:
        key = "eagle_aux_hidden_state_layer_ids"
        taps = layer_ids(f, key, target_layers) or default_taps(target_layers)
    else:
        taps = _flat_taps(f, target_layers)
        flags["input_norm"] = False
    tap_width = f.integer("target_hidden_size", values["hidden"])
    if tap_width != target_hidden:
        raise UnsupportedModelError(f"{f.path}: made for a hidden size of {tap_width}, the target's is {target_hidden}")
    draft_vocabulary = f.integer("draft_vocab_size", 32_000 if speculators else values["vocabulary"])
    return Eagle3Config(tuple(sorted(taps)), tap_width, draft_vocabulary=draft_vocabulary, **values, **flags)


def _flat_taps(f: Fields, layers: int) -> tuple[int, ...]:
    """SpecForge names outputs of layers, where the first is 1 by convention; SafeAILab names none."""
    section = f.section("eagle_config")
    ids = layer_ids(section, "eagle_aux_hidden_state_layer_ids", layers)
    if ids is None:
        return default_taps(layers)
    return tuple(i + 1 for i in ids) if min(ids) == 1 else ids


def _shape(f: Fields, checkpoint: Checkpoint) -> dict[str, Any]:
    kind = f.get("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        raise UnsupportedModelError(f"{f.path}: an EAGLE-3 drafter of type {str(kind)[:40]!r} is not supported")
    f.only("hidden_act", "silu", "swish")
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    head_dim = f.integer("head_dim", hidden // max(heads, 1))
    layers = max(f.integer("num_hidden_layers", 1), 1) if "layers.0.hidden_norm.weight" in checkpoint.tensors else 1
    if layers > MOST_LAYERS:
        raise f.fail("num_hidden_layers", f"{layers} is more than {MOST_LAYERS}")
    windows = read_hf.windows(f, layers, [False] * layers) if layers == f.integer("num_hidden_layers", 1) else (None,)
    if len(set(windows)) != 1:
        raise UnsupportedModelError(f"{f.path}: layers with and without a window in one drafter are not supported")
    return {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": f.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "ffn": f.integer("intermediate_size"),
        "vocabulary": f.integer("vocab_size"),
        "norm_eps": f.number("rms_norm_eps", 1e-6),
        "rope": read_hf.rope(f, head_dim),
        "window": windows[0],
        "qk_norm": kind == "qwen3",
        "qkv_bias": f.flag("attention_bias", False),
        "mlp_bias": f.flag("mlp_bias", False),
    }


def eagle3_weights(
    c: Eagle3Config, checkpoint: Checkpoint, target: WeightSource | None
) -> tuple[DrafterWeights, Int32Array | None]:
    """The weights, and the tokens that the head's rows stand for (None: all)."""
    midlayer = "midlayer.hidden_norm.weight" in checkpoint.tensors
    prefixes = ["midlayer." if midlayer else "layers.0.", *(f"layers.{i}." for i in range(1, c.layers))]
    names = named_layers(checkpoint, prefixes, HF_LAYER | {"hidden_norm": "hidden_norm"})
    names |= {"norm.weight": "norm.weight", "head.weight": "lm_head.weight", "input_norm.weight": "input_norm.weight"}
    made = {}
    if c.tap_norms:  # a norm's weight scales the columns that the joining matrix reads
        joined = checkpoint.tensors["fc.weight"].float32()
        scales = [checkpoint.tensors[f"fc_norm.{i}.weight"].float32() for i in range(len(c.taps))]
        made = {"fc.weight": joined * np.concatenate(scales), "ones.weight": np.ones(c.tap_width, np.float32)}
    else:
        names["fc.weight"] = "fc.weight"
    if "embed_tokens.weight" in checkpoint.tensors:
        names[EMBEDDING] = "embed_tokens.weight"
    weights = DrafterWeights(checkpoint, names, made, target)
    return weights, token_map(checkpoint, c.draft_vocabulary, c.vocabulary)


def record_eagle3(c: Eagle3Config, max_len: int, kv_format: KVFormat, state: str, *, from_taps: bool) -> Program:
    """The drafter's program over the target's taps, or over its own hidden state.

    A row is a token with the hidden state of the position before, and its keys and values lie at the token's position:
    so they depend on nothing that comes later. Position 0 has no hidden state before it and is never seen.
    """
    group = CacheGroup(GroupKind.DRAFTER, c.layers, c.kv_heads, c.head_dim, c.head_dim, kv_format, c.window, state)
    p = Recorder(CacheSpec((group,)))
    e = p.embed(EMBEDDING, c.vocabulary, c.hidden)
    x = _joined(p, c) if from_taps else p.input(c.hidden)
    for layer in range(c.layers):
        at = f"layers.{layer}"
        if layer == 0:
            normed = p.rmsnorm(x, f"{at}.hidden_norm.weight", c.norm_eps)
            h = p.concat(p.rmsnorm(e, f"{at}.attn_norm.weight", c.norm_eps), normed)
            residual = normed if c.residual_normed else x
        else:
            h, residual = p.rmsnorm(x, f"{at}.attn_norm.weight", c.norm_eps), x
        x = p.add(residual, _attention(p, c, layer, h, max_len))
        h = p.rmsnorm(x, f"{at}.ffn_norm.weight", c.norm_eps)
        gate = p.linear(h, f"{at}.gate.weight", c.ffn, bias=c.mlp_bias)
        up = p.linear(h, f"{at}.up.weight", c.ffn, bias=c.mlp_bias)
        x = p.add(x, p.linear(p.gated(gate, up, "silu"), f"{at}.down.weight", c.hidden, bias=c.mlp_bias))
    normed = p.rmsnorm(x, "norm.weight", c.norm_eps)
    p.hand_out(normed if c.fed_normed else x, HIDDEN)
    p.sample(p.logits(normed, "head.weight", c.draft_vocabulary))
    return p.program()


def _joined(p: Recorder, c: Eagle3Config) -> Value:
    """All taps side by side, joined to one hidden state."""
    taps = p.input(len(c.taps) * c.tap_width)
    if c.tap_norms:
        taps = p.rmsnorm(taps, "ones.weight", c.norm_eps, len(c.taps))
    elif c.input_norm:
        taps = p.rmsnorm(taps, "input_norm.weight", c.norm_eps)
    return p.linear(taps, "fc.weight", c.hidden)


def _attention(p: Recorder, c: Eagle3Config, layer: int, h: Value, max_len: int) -> Value:
    at = f"layers.{layer}"
    table, factor = c.rope.table(max_len)
    q = p.linear(h, f"{at}.q.weight", c.heads * c.head_dim, bias=c.qkv_bias)
    k = p.linear(h, f"{at}.k.weight", c.kv_heads * c.head_dim, bias=c.qkv_bias)
    v = p.linear(h, f"{at}.v.weight", c.kv_heads * c.head_dim, bias=c.qkv_bias)
    if c.qk_norm:
        q = p.rmsnorm(q, f"{at}.q_norm.weight", c.norm_eps, c.heads)
        k = p.rmsnorm(k, f"{at}.k_norm.weight", c.norm_eps, c.kv_heads)
    q = p.rope(q, c.head_dim, "rope", table, factor)
    k = p.rope(k, c.head_dim, "rope", table, factor)
    p.kv_write(k, v, 0, layer)
    out = p.attention(q, 0, layer, c.head_dim**-0.5, start=1)
    return p.linear(out, f"{at}.o.weight", c.hidden, bias=c.qkv_bias)
