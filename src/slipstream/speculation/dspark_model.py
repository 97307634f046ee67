"""What a DSpark drafter is: its config in three layouts, its weights, and its two programs.

Layouts: DeepSpec (the paper's), SpecForge, speculators. Facts were taken from their code (deepseek-ai/DeepSpec afdfa7c,
sgl-project/SpecForge a6b6b02, vllm-project/speculators c05b95b and ff71b1e); the tests hold what their code computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from slipstream.errors import UnsupportedModelError
from slipstream.models import read_hf
from slipstream.models.config import Fields
from slipstream.models.names import HF_LAYER
from slipstream.models.rope import RopeConfig
from slipstream.models.weights import WeightSource
from slipstream.program import CacheGroup, CacheSpec, GroupKind, KVFormat, Program, Recorder
from slipstream.program.ops import MaskKind, Value
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
"""The tap of the block's hidden states after the final norm."""
MOST_LAYERS, MOST_BLOCK, MOST_RANK = 16, 64, 4096

WindowRule = Literal["row", "anchor", "anchor, both ways"]
"""A window reaches back from each row (SpecForge), or from
the anchor for all rows alike (speculators); inside the block only what came before is seen, or, with "both ways",
everything. Layers without a window always see all of the block.
"""
MarkovKind = Literal["none", "vanilla", "gated", "rnn"]


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    """A DSpark drafter. `taps` are the target's layers whose inputs it reads; `windows` are those of its own layers.

    `block` tokens are run at once: the anchor, which is the last known token, and masks. `first_slot` is the first of
    them that predicts: the anchor (0), or the mask after it (1).
    """

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
    windows: tuple[int | None, ...]
    window_rule: WindowRule
    bias: bool
    block: int
    mask_token: int
    first_slot: int
    markov: MarkovKind
    rank: int
    confidence: bool
    confidence_with_markov: bool

    @property
    def drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.block - self.first_slot


def read_dspark(checkpoint: Checkpoint, target_layers: int, target_hidden: int) -> DSparkConfig:
    """The config, whichever layout it is in. Raises SlipstreamError for one that is damaged or not supported."""
    f = Fields(checkpoint.files[0].parent / "config.json", checkpoint.metadata)
    if "Gemma4DSparkModel" in (f.get("architectures") or []):
        raise UnsupportedModelError(f"{f.path}: DSpark drafters for Gemma 4 are not supported")
    if "speculators_model_type" in f:
        model, values = f.section("transformer_layer_config"), _speculators(f, target_layers)
    elif "dflash_config" in f and "target_layer_ids" not in f:
        model, values = f, _specforge(f, target_layers)
    else:
        model, values = f, _deepspec(f, target_layers)
    values = _shape(model) | values
    if values["hidden"] != target_hidden:
        raise UnsupportedModelError(
            f"{f.path}: made for a hidden size of {values['hidden']}, the target's is {target_hidden}"
        )
    values["draft_vocabulary"] = values.get("draft_vocabulary") or values["vocabulary"]
    if not 0 <= values["mask_token"] < values["vocabulary"] or not 1 < values["block"] <= MOST_BLOCK:
        raise f.fail("mask_token_id", f"{values['mask_token']} (block of {values['block']}) is out of range")
    if values["rank"] > MOST_RANK or values["markov"] not in ("none", "vanilla", "gated", "rnn"):
        raise f.fail("markov_head_type", f"{str(values['markov'])[:40]!r} of rank {values['rank']} is not supported")
    return DSparkConfig(tap_width=target_hidden, **values)


def _shape(f: Fields) -> dict[str, Any]:
    if (kind := f.get("model_type", "qwen3")) != "qwen3":
        raise UnsupportedModelError(f"{f.path}: a DSpark drafter of type {str(kind)[:40]!r} is not supported")
    f.only("hidden_act", "silu", "swish")
    layers, heads = f.integer("num_hidden_layers"), f.integer("num_attention_heads")
    if not 1 <= layers <= MOST_LAYERS:
        raise f.fail("num_hidden_layers", f"{layers} is not from 1 to {MOST_LAYERS}")
    head_dim = f.integer("head_dim", f.integer("hidden_size") // max(heads, 1))
    return {
        "hidden": f.integer("hidden_size"),
        "layers": layers,
        "heads": heads,
        "kv_heads": f.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "ffn": f.integer("intermediate_size"),
        "vocabulary": f.integer("vocab_size"),
        "norm_eps": f.number("rms_norm_eps", 1e-6),
        "rope": read_hf.rope(f, head_dim),
        "windows": read_hf.windows(f, layers, [False] * layers),
        "bias": f.flag("attention_bias", False),
        "window_rule": "row",
        "first_slot": 0,
    }


def _heads(f: Fields, rank: int, confidence: bool, with_markov: bool) -> dict[str, Any]:
    rank = f.integer("markov_rank", rank)
    return {
        "rank": rank,
        "markov": f.get("markov_head_type", "vanilla") if rank > 0 else "none",
        "confidence": f.flag("enable_confidence_head", confidence),
        "confidence_with_markov": f.flag("confidence_with_markov", with_markov)
        if "confidence_with_markov" in f
        else f.flag("confidence_head_with_markov", with_markov),
    }


def _outputs(f: Fields, layers: int) -> tuple[int, ...]:
    """Layers whose outputs are meant; -1 is the embedding. As inputs: one further."""
    ids = layer_ids(f, "target_layer_ids", layers - 1)
    if ids is None:
        raise f.fail("target_layer_ids", "is missing")
    return tuple(i + 1 for i in ids)


def _deepspec(f: Fields, layers: int) -> dict[str, Any]:
    return {
        "taps": _outputs(f, layers),
        "block": f.integer("block_size"),
        "mask_token": f.integer("mask_token_id"),
        **_heads(f, 0, False, True),
    }


def _specforge(f: Fields, layers: int) -> dict[str, Any]:
    section = f.section("dflash_config")
    drawn = section.number("confidence_head_alpha", 0.0) > 0
    if "target_layer_ids" in section:
        taps = _outputs(section, layers)
    else:
        count = f.integer("num_hidden_layers")
        last = layers - 3
        ids = [layers // 2] if count == 1 else [round(1 + i * (last - 1) / (count - 1)) for i in range(count)]
        taps = tuple(i + 1 for i in ids)
    return {
        "taps": taps,
        "block": f.integer("block_size"),
        "mask_token": section.integer("mask_token_id"),
        **_heads(section, 0, drawn, False),
    }


def _speculators(f: Fields, layers: int) -> dict[str, Any]:
    block = f.integer("block_size", 8)
    proposals = f.section("speculators_config").get("proposal_methods") or [{}]
    drafts = proposals[0].get("speculative_tokens") if isinstance(proposals[0], dict) else None
    # Before July 2026 the key did not exist, and the anchor drafted nothing.
    from_anchor = f.flag("sample_from_anchor") if "sample_from_anchor" in f else drafts == block
    both = f.flag("sliding_window_non_causal", False)
    return {
        "taps": layer_ids(f, "aux_hidden_state_layer_ids", layers) or (2, layers // 2, layers - 3),
        "block": block,
        "mask_token": f.integer("mask_token_id"),
        "draft_vocabulary": f.integer("draft_vocab_size", 32_000),
        "first_slot": 0 if from_anchor else 1,
        "window_rule": "anchor, both ways" if both else "anchor",
        **_heads(f, 256, True, True),
    }


def dspark_weights(
    c: DSparkConfig, checkpoint: Checkpoint, target: WeightSource | None
) -> tuple[DrafterWeights, Int32Array | None]:
    """The weights, and the tokens that the head's rows stand for (None: all)."""
    names = named_layers(checkpoint, [f"layers.{i}." for i in range(c.layers)], HF_LAYER)
    names |= {f"{name}.weight": f"{name}.weight" for name in ("fc", "hidden_norm", "norm")}
    for mine, theirs in ((EMBEDDING, "embed_tokens.weight"), ("head.weight", "lm_head.weight")):
        if theirs in checkpoint.tensors:
            names[mine] = theirs
    tokens = token_map(checkpoint, c.draft_vocabulary, c.vocabulary)
    return DrafterWeights(checkpoint, names, target=target), tokens


def dspark_cache(c: DSparkConfig, kv_format: KVFormat, state: str) -> CacheSpec:
    """A cache group for each kind of window."""
    kinds = sorted(set(c.windows), key=lambda window: (window is not None, window or 0))
    return CacheSpec(
        tuple(
            CacheGroup(GroupKind.DRAFTER, c.windows.count(w), c.kv_heads, c.head_dim, c.head_dim, kv_format, w, state)
            for w in kinds
        )
    )


def record_context(c: DSparkConfig, max_len: int, kv_format: KVFormat, state: str) -> Program:
    """Hidden states of the target become keys and values of every layer at their positions, and that is all."""
    p = Recorder(dspark_cache(c, kv_format, state))
    joined = p.linear(p.input(len(c.taps) * c.tap_width), "fc.weight", c.hidden)
    context = p.rmsnorm(joined, "hidden_norm.weight", c.norm_eps)
    for layer in range(c.layers):
        _keys_and_values(p, c, layer, context, max_len)
    return p.program()


def record_block(c: DSparkConfig, max_len: int, kv_format: KVFormat, state: str) -> Program:
    """The anchor and its masks, over the context and one another. It has the context program's weights as well."""
    p = Recorder(dspark_cache(c, kv_format, state))
    x = p.embed(EMBEDDING, c.vocabulary, c.hidden)
    for layer in range(c.layers):
        at = f"layers.{layer}"
        h = p.rmsnorm(x, f"{at}.attn_norm.weight", c.norm_eps)
        table, factor = c.rope.table(max_len)
        q = p.linear(h, f"{at}.q.weight", c.heads * c.head_dim, bias=c.bias)
        q = p.rmsnorm(q, f"{at}.q_norm.weight", c.norm_eps, c.heads)
        q = p.rope(q, c.head_dim, "rope", table, factor)
        group, index = _keys_and_values(p, c, layer, h, max_len)
        windowed = c.windows[layer] is not None
        mask = MaskKind.CAUSAL if windowed and c.window_rule != "anchor, both ways" else MaskKind.BLOCK
        anchored = windowed and c.window_rule != "row"
        out = p.attention(q, group, index, c.head_dim**-0.5, mask=mask, anchored=anchored)
        x = p.add(x, p.linear(out, f"{at}.o.weight", c.hidden, bias=c.bias))
        h = p.rmsnorm(x, f"{at}.ffn_norm.weight", c.norm_eps)
        gate, up = p.linear(h, f"{at}.gate.weight", c.ffn), p.linear(h, f"{at}.up.weight", c.ffn)
        x = p.add(x, p.linear(p.gated(gate, up, "silu"), f"{at}.down.weight", c.hidden))
    normed = p.rmsnorm(x, "norm.weight", c.norm_eps)
    p.hand_out(normed, HIDDEN)
    p.sample(p.logits(normed, "head.weight", c.draft_vocabulary))
    block, context = p.program(), record_context(c, max_len, kv_format, state)
    return replace(block, weights={**context.weights, **block.weights})


def _keys_and_values(p: Recorder, c: DSparkConfig, layer: int, x: Value, max_len: int) -> tuple[int, int]:
    """Write a layer's keys and values of x; returns its place in the cache."""
    at = f"layers.{layer}"
    table, factor = c.rope.table(max_len)
    k = p.linear(x, f"{at}.k.weight", c.kv_heads * c.head_dim, bias=c.bias)
    v = p.linear(x, f"{at}.v.weight", c.kv_heads * c.head_dim, bias=c.bias)
    k = p.rmsnorm(k, f"{at}.k_norm.weight", c.norm_eps, c.kv_heads)
    k = p.rope(k, c.head_dim, "rope", table, factor)
    windows = sorted(set(c.windows), key=lambda window: (window is not None, window or 0))
    group, index = windows.index(c.windows[layer]), c.windows[:layer].count(c.windows[layer])
    p.kv_write(k, v, group, index)
    return group, index
