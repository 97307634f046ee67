"""Pieces that the architectures' programs are made of."""

from __future__ import annotations

from slipstream.models.config import ModelConfig
from slipstream.program import Recorder
from slipstream.program.ops import Value


def embed(p: Recorder, c: ModelConfig) -> Value:
    """Token embeddings [rows, hidden]."""
    return p.embed("embed.weight", c.vocabulary, c.hidden, c.embed_scale)


def norm(p: Recorder, c: ModelConfig, x: Value, name: str) -> Value:
    """The norm `name` over whole rows."""
    return p.rmsnorm(x, f"{name}.weight", c.norm_eps)


def attention(p: Recorder, c: ModelConfig, layer: int, x: Value, max_len: int) -> Value:
    """Self-attention of an already normed x [rows, hidden], its output projection included."""
    at = f"layers.{layer}"
    group, index = c.cache_place(layer)
    local = c.windows[layer] is not None and c.local_rope is not None
    rope = c.local_rope if local and c.local_rope else c.rope
    table, factor = rope.table(max_len)

    def project(part: str, heads: int) -> Value:
        return p.linear(x, f"{at}.{part}.weight", heads * c.head_dim, bias=c.qkv_bias, shard="out")

    q, k, v = project("q", c.heads), project("k", c.kv_heads), project("v", c.kv_heads)
    if c.qk_norm:
        q = p.rmsnorm(q, f"{at}.q_norm.weight", c.norm_eps, p.width(q) // c.head_dim)
        k = p.rmsnorm(k, f"{at}.k_norm.weight", c.norm_eps, p.width(k) // c.head_dim)
    name = "rope.local" if local else "rope"
    q = p.rope(q, c.head_dim, name, table, factor)
    k = p.rope(k, c.head_dim, name, table, factor)
    p.kv_write(k, v, group, index)
    out = p.attention(q, group, index, c.scale, softcap=c.attention_softcap)
    out = p.linear(out, f"{at}.o.weight", c.hidden, bias=c.output_bias, shard="in")
    return p.all_reduce(out)


def mlp(p: Recorder, c: ModelConfig, layer: int, x: Value) -> Value:
    """The gated feed-forward of an already normed x [rows, hidden]."""
    at = f"layers.{layer}"
    gate = p.linear(x, f"{at}.gate.weight", c.ffn, bias=c.mlp_bias, shard="out")
    up = p.linear(x, f"{at}.up.weight", c.ffn, bias=c.mlp_bias, shard="out")
    h = p.gated(gate, up, c.activation)
    return p.all_reduce(p.linear(h, f"{at}.down.weight", c.hidden, bias=c.mlp_bias, shard="in"))


def head(p: Recorder, c: ModelConfig, x: Value) -> None:
    """Final norm, logits, and sampling inside the step."""
    weight = "embed.weight" if c.tied_head else "head.weight"
    p.tap(x, c.layers)
    logits = p.logits(norm(p, c, x, "norm"), weight, c.vocabulary, softcap=c.final_softcap)
    p.sample(logits)
