"""Work: the bytes a step must read and the operations it must do, from a model's shape."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.roofline.precision import Precision
from slipstream.roofline.shape import Layers, ModelShape

KV_SCALE_BITS = 32.0
"""A float32 scale per token and head goes with a cache of 8 bits or fewer."""


@dataclass(frozen=True, slots=True)
class Work:
    """One step: bytes read by kind, operations (a multiply and an add are two), distinct experts of a layer."""

    weight_bytes: float
    kv_bytes: float
    weight_operations: float
    attention_operations: float
    distinct_experts: float = 0.0

    @property
    def bytes(self) -> float:
        """All bytes read."""
        return self.weight_bytes + self.kv_bytes

    @property
    def operations(self) -> float:
        """All operations."""
        return self.weight_operations + self.attention_operations

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.bytes if self.bytes else 0.0


def distinct_experts(experts: int, active: int, rows: int) -> float:
    """Expected number of different experts that `rows` rows choose, evenly and independently."""
    return experts * (1.0 - (1.0 - active / experts) ** rows) if experts else 0.0


def seen(layers: Layers, context: float) -> float:
    """Tokens of context that a row of these layers sees."""
    return context if layers.window is None else min(context, layers.window)


def decode_work(
    shape: ModelShape,
    precision: Precision,
    rows: int,
    context: float,
    kv_bits: float = 16.0,
    *,
    rows_per_sequence: int = 1,
) -> Work:
    """A step of `rows` rows in sequences of `context` tokens, every row with logits.

    The head is read whole, the embedding one row a token. Rows of one sequence (a verified draft) read its
    cache once. With 8 bits or fewer, the cache's scales are read as well.
    """
    scale_bits = KV_SCALE_BITS if kv_bits <= 8 else 0.0
    bits = shape.head * precision.head + rows * shape.hidden * (
        precision.embedding if shape.embedding else precision.head
    )
    kv = attention = experts = 0.0
    for group in shape.layers:
        chosen = distinct_experts(group.experts, group.active, rows)
        experts = max(experts, chosen)
        bits += group.count * (group.attention + group.dense + chosen * group.expert) * precision.bits
        tokens = seen(group, context)
        kv += group.count * rows / rows_per_sequence * tokens * (group.cached * kv_bits + group.scales * scale_bits) / 8
        attention += group.count * 2.0 * rows * tokens * group.scores
    return Work(bits / 8, kv, 2.0 * rows * shape.active_parameters, attention, experts)


def prefill_operations(shape: ModelShape, tokens: int) -> float:
    """Operations of reading a prompt of `tokens` tokens, its last row alone with logits."""
    total = 2.0 * tokens * (shape.active_parameters - shape.head) + 2.0 * shape.head
    for group in shape.layers:
        window = tokens if group.window is None else min(tokens, group.window)
        pairs = window * (window + 1) / 2 + (tokens - window) * window
        total += group.count * 2.0 * pairs * group.scores
    return total


def model_bytes(shape: ModelShape, precision: Precision) -> float:
    """Bytes of all weights in memory."""
    body = sum(g.count * (g.attention + g.dense + g.experts * g.expert) for g in shape.layers)
    return (body * precision.bits + shape.head * precision.head + shape.embedding * precision.embedding) / 8


def kv_bytes_held(shape: ModelShape, tokens: float, kv_bits: float) -> float:
    """Bytes of the cache of one sequence of `tokens` tokens; windows hold no more than themselves."""
    scale_bits = KV_SCALE_BITS if kv_bits <= 8 else 0.0
    return sum(g.count * seen(g, tokens) * (g.cached * kv_bits + g.scales * scale_bits) for g in shape.layers) / 8
