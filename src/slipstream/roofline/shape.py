"""ModelShape: the sizes of a model that decide how much a step reads and computes; no weights are needed.

Read from the keys of a Hugging Face config.json; `named.py` has the ones that come with the package and
`source.py` the ones that lie in files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from slipstream.errors import UsageError

_PARAMETERS = re.compile(r"^(\d+(?:\.\d+)?)\s*([mbt])$", re.IGNORECASE)
_SCALE = {"m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True)
class Layers:
    """`count` equal layers. Numbers are of one layer.

    `attention` are the weights of its projections, `dense` those every row goes through (feed-forward, shared
    experts, router); of `experts` of `expert` weights each, a row takes `active`. `cached` numbers are kept
    per token (`scales` scales with them) and `scores` multiply-adds are done per row and token of context, up to
    `window`.
    """

    count: int
    attention: int
    dense: int
    cached: int
    scales: int
    scores: int
    window: int | None = None
    experts: int = 0
    active: int = 0
    expert: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes. `head` are the weights of the output matrix; `embedding` those of a table of its own.

    `hidden` is 0 for a shape of which only the number of weights is known.
    """

    name: str
    hidden: int
    vocabulary: int
    layers: tuple[Layers, ...]
    head: int
    embedding: int
    context: int = 0

    @property
    def depth(self) -> int:
        """Number of layers."""
        return sum(group.count for group in self.layers)

    @property
    def parameters(self) -> int:
        """All weights, norms left out."""
        per_layer = sum(g.count * (g.attention + g.dense + g.experts * g.expert) for g in self.layers)
        return per_layer + self.head + self.embedding

    @property
    def active_parameters(self) -> int:
        """Weights that one row is multiplied with."""
        return sum(g.count * (g.attention + g.dense + g.active * g.expert) for g in self.layers) + self.head

    def kv_bits_per_token(self, bits: float, scale_bits: float = 0.0) -> float:
        """Bits that one token takes in the cache."""
        return sum(g.count * (g.cached * bits + g.scales * scale_bits) for g in self.layers)


def parameters_only(text: str) -> ModelShape | None:
    """ "70b", "1.5B", "135m": a shape of which only the number of weights is known; None if it is no number."""
    match = _PARAMETERS.match(text.strip())
    if match is None:
        return None
    weights = round(float(match[1]) * _SCALE[match[2].lower()])
    return ModelShape(text.upper(), 0, 0, (Layers(1, 0, weights, 0, 0, 0),), 0, 0)


class _Config:
    """Typed looks at config.json; any of several names, since families differ."""

    def __init__(self, name: str, values: Mapping[str, Any]):
        text = values.get("text_config")
        self.name, self.values = name, text if isinstance(text, Mapping) else values

    def has(self, *keys: str) -> bool:
        return any(self.values.get(key) is not None for key in keys)

    def number(self, *keys: str, default: int | None = None) -> int:
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1 << 40:
                raise UsageError(f"{self.name}: {key} is {value!r}, expected a whole number")
            return value
        if default is None:
            raise UsageError(f"{self.name}: {keys[0]} is missing from the config")
        return default


def shape_of(name: str, values: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json describes. Raises UsageError for what is missing or makes no sense."""
    c = _Config(name, values)
    hidden, depth = c.number("hidden_size", "n_embd"), c.number("num_hidden_layers", "n_layer")
    heads = c.number("num_attention_heads", "n_head")
    vocabulary = c.number("vocab_size")
    if not 0 < depth <= 10_000 or not heads or not hidden or not vocabulary:
        raise UsageError(f"{name}: layers, heads, hidden size and vocabulary must be positive")
    windows = _windows(c, depth)
    layers = [_layer(c, index, hidden, heads, windows[index]) for index in range(depth)]
    groups = tuple(_counted(layer, len(list(run))) for layer, run in groupby(sorted(layers, key=repr)))
    tied = bool(c.values.get("tie_word_embeddings", values.get("tie_word_embeddings", False)))
    table = vocabulary * hidden
    context = c.number("max_position_embeddings", "n_positions", default=0)
    return ModelShape(name, hidden, vocabulary, groups, table, 0 if tied else table, context)


def _counted(layer: Layers, count: int) -> Layers:
    return Layers(
        count, layer.attention, layer.dense, layer.cached, layer.scales, layer.scores, layer.window,
        layer.experts, layer.active, layer.expert,
    )  # fmt: skip


def _windows(c: _Config, depth: int) -> list[int | None]:
    window = c.number("sliding_window", default=0) or None
    if c.values.get("use_sliding_window") is False:
        window = None
    kinds = c.values.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == depth:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    every = c.number("sliding_window_pattern", default=0)
    if every:
        return [None if (index + 1) % every == 0 else window for index in range(depth)]
    return [window] * depth


def _layer(c: _Config, index: int, hidden: int, heads: int, window: int | None) -> Layers:
    attention, cached, scales, scores = (
        _latent(c, hidden, heads) if c.has("kv_lora_rank") else _grouped(c, hidden, heads)
    )
    matrices = c.number("ffn_matrices", default=3)
    experts = c.number("num_local_experts", "num_experts", "n_routed_experts", default=0)
    first = c.number("first_k_dense_replace", default=0)
    every = c.number("decoder_sparse_step", "moe_layer_freq", default=1) or 1
    if not experts or index < first or (index + 1) % every:
        ffn = c.number("intermediate_size", "n_inner", default=4 * hidden)
        return Layers(1, attention, matrices * hidden * ffn, cached, scales, scores, window)
    width = c.number("moe_intermediate_size", "intermediate_size")
    active = c.number("num_experts_per_tok", "num_experts_per_token")
    if not 0 < active <= experts:
        raise UsageError(f"{c.name}: {active} of {experts} experts a token make no sense")
    shared = c.number("n_shared_experts", default=0) * width + c.number("shared_expert_intermediate_size", default=0)
    dense = matrices * hidden * shared + hidden * experts
    return Layers(
        1, attention, dense, cached, scales, scores, window, experts, active, matrices * hidden * width
    )  # fmt: skip


def _grouped(c: _Config, hidden: int, heads: int) -> tuple[int, int, int, int]:
    """Multi-head, grouped-query and multi-query attention: (weights, cached numbers, scales, scores)."""
    width = c.number("head_dim", default=hidden // heads)
    kv_heads = c.number("num_key_value_heads", default=heads)
    weights = hidden * width * (2 * heads + 2 * kv_heads)
    return weights, 2 * kv_heads * width, 2 * kv_heads, 2 * heads * width


def _latent(c: _Config, hidden: int, heads: int) -> tuple[int, int, int, int]:
    """Multi-head latent attention, its up-projections absorbed (DeepSeek-V2, arXiv 2405.04434)."""
    rank, rope = c.number("kv_lora_rank"), c.number("qk_rope_head_dim")
    plain, value = c.number("qk_nope_head_dim"), c.number("v_head_dim")
    query = c.number("q_lora_rank", default=0)
    into_heads = heads * (plain + rope)
    weights = hidden * query + query * into_heads if query else hidden * into_heads
    weights += hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden
    return weights, rank + rope, 1, heads * (2 * rank + rope)
