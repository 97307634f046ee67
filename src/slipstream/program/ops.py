"""The op set: everything a model may say to a backend.

A value is a float matrix [rows, width], named by its index in the program. Ops are frozen and carry
their own sizes, so that a backend compiles a program without looking anything up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Value = int
Activation = Literal["silu", "gelu_tanh"]
ShardAxis = Literal["none", "out", "in"]


class MaskKind(StrEnum):
    """Which positions a row of an attention op sees."""

    CAUSAL = "causal"
    """The cached positions, the row's ancestors in the step, and itself."""
    BLOCK = "block"
    """The cached positions and every row of its span (block drafters)."""


@dataclass(frozen=True, slots=True)
class Embed:
    """out[r] = table[token[r]] * scale."""

    out: Value
    table: str
    width: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Input:
    """out = numbers [rows, width] that the step is handed with its rows (hidden states of another model)."""

    out: Value
    width: int


@dataclass(frozen=True, slots=True)
class Concat:
    """out = a and b side by side."""

    out: Value
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """out = x / sqrt(mean(x²) + eps) * weight, over each of `heads` equal parts of a row."""

    out: Value
    x: Value
    weight: str
    eps: float
    heads: int = 1


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x @ weight.T (+ bias). `shard` is the axis of [out, in] that tensor parallelism cuts.

    `adapted` ops add the low-rank update of each row's adapter.
    """

    out: Value
    x: Value
    weight: str
    rows_out: int
    rows_in: int
    bias: str | None = None
    shard: ShardAxis = "none"
    adapted: bool = True


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotate the first `2 * len(table)` numbers of each head by position; halves, not pairs.

    `table` names a constant of inverse frequencies [rotary / 2]; sine and cosine are multiplied by
    `factor` (yarn's and longrope's attention factor).
    """

    out: Value
    x: Value
    heads: int
    head_dim: int
    table: str
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class KVWrite:
    """Store keys [rows, heads * k_dim] and values [rows, heads * v_dim] at the rows' slots."""

    k: Value
    v: Value
    group: int
    layer: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention of q [rows, heads * k_dim] over one layer of one cache group.

    Scores are q·k * scale, then softcap * tanh(score / softcap) if `softcap` is set. Keys and values
    are always read back through the group's stored format, the step's own included. Positions before `start` are never
    seen. A window ends with the row itself; where it is `anchored` it ends before the span's first row, and the rows of
    the span, as far as the mask shows them, are seen besides.
    """

    out: Value
    q: Value
    group: int
    layer: int
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    mask: MaskKind = MaskKind.CAUSAL
    window: int | None = None
    softcap: float | None = None
    start: int = 0
    anchored: bool = False


@dataclass(frozen=True, slots=True)
class Recurrence:
    """state[t] = decay * state[t-1] + x[t]; out = state. `decay` is a weight [width]."""

    out: Value
    x: Value
    decay: str
    group: int
    layer: int


@dataclass(frozen=True, slots=True)
class Gated:
    """out = activation(gate) * up."""

    out: Value
    gate: Value
    up: Value
    activation: Activation


@dataclass(frozen=True, slots=True)
class Add:
    """out = a + b."""

    out: Value
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Collective:
    """out = x summed over ("all_reduce") or joined along the width ("all_gather") of all shards."""

    out: Value
    x: Value
    kind: Literal["all_reduce", "all_gather"]


@dataclass(frozen=True, slots=True)
class Tap:
    """Hand x [rows, width] out of the step under `name`."""

    x: Value
    name: str


@dataclass(frozen=True, slots=True)
class Logits:
    """out = x[logit rows] @ weight.T, soft-capped: a matrix [logit rows, vocabulary]."""

    out: Value
    x: Value
    weight: str
    vocabulary: int
    rows_in: int
    softcap: float | None = None
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Draw the next token of every logit row with its own sampling settings, and verify drafts."""

    logits: Value


Op = (
    Embed
    | Input
    | Concat
    | RMSNorm
    | Linear
    | Rope
    | KVWrite
    | Attention
    | Recurrence
    | Gated
    | Add
    | Collective
    | Tap
    | Logits
    | Sample
)
