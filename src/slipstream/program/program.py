"""Program and Recorder: a model written down once as ops, to be replayed every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from slipstream.program import ops
from slipstream.program.cache import CacheGroup, CacheSpec
from slipstream.program.ops import Value

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """This process's share of a tensor-parallel model."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is outside a plan of {self.size}")

    def part(self, total: int, what: str) -> int:
        """`total / size`. Raises ValueError, naming `what`, if it does not divide."""
        if total % self.size:
            raise ValueError(f"{what} ({total}) cannot be cut into {self.size} equal shards")
        return total // self.size


@dataclass(frozen=True, slots=True)
class WeightUse:
    """A weight that a program reads: its shape after sharding, and the axis that was cut."""

    name: str
    shape: tuple[int, ...]
    shard: ops.ShardAxis = "none"
    role: Literal["matrix", "vector", "embedding"] = "matrix"


@dataclass(frozen=True)
class Program:
    """Ops in order, with the weights, constants and cache they use. Compiled by a backend."""

    ops: tuple[ops.Op, ...]
    widths: tuple[int, ...]
    weights: Mapping[str, WeightUse]
    constants: Mapping[str, Float32Array]
    cache: CacheSpec
    vocabulary: int
    shard: ShardPlan = field(default_factory=ShardPlan)

    @property
    def taps(self) -> tuple[str, ...]:
        """Names of the hidden states a step hands out."""
        return tuple(op.name for op in self.ops if isinstance(op, ops.Tap))

    @property
    def collectives(self) -> int:
        """Collective operations in one step."""
        return sum(isinstance(op, ops.Collective) for op in self.ops)


class Recorder:
    """Writes a Program. A model's function calls these methods in the order of its layers."""

    def __init__(self, cache: CacheSpec, shard: ShardPlan | None = None, taps: tuple[int, ...] = ()):
        self.cache = cache
        self.shard = shard or ShardPlan()
        self._wanted_taps = frozenset(taps)
        self._ops: list[ops.Op] = []
        self._widths: list[int] = []
        self._weights: dict[str, WeightUse] = {}
        self._constants: dict[str, Float32Array] = {}
        self._vocabulary = 0

    def width(self, x: Value) -> int:
        """Columns of a value."""
        return self._widths[x]

    def embed(self, table: str, vocabulary: int, width: int, scale: float = 1.0) -> Value:
        """Rows of an embedding table [vocabulary, width]."""
        self._use(WeightUse(table, (vocabulary, width), role="embedding"))
        out = self._value(width)
        self._ops.append(ops.Embed(out, table, width, scale))
        return out

    def input(self, width: int) -> Value:
        """Numbers [rows, width] that a step is handed."""
        out = self._value(width)
        self._ops.append(ops.Input(out, width))
        return out

    def concat(self, a: Value, b: Value) -> Value:
        """a and b side by side."""
        out = self._value(self.width(a) + self.width(b))
        self._ops.append(ops.Concat(out, a, b))
        return out

    def rmsnorm(self, x: Value, weight: str, eps: float, heads: int = 1) -> Value:
        """Root-mean-square norm of each row, or of each of its heads."""
        self._use(WeightUse(weight, (self.width(x) // heads,), role="vector"))
        out = self._value(self.width(x))
        self._ops.append(ops.RMSNorm(out, x, weight, eps, heads))
        return out

    def linear(
        self,
        x: Value,
        weight: str,
        rows_out: int,
        *,
        bias: bool = False,
        shard: ops.ShardAxis = "none",
    ) -> Value:
        """x @ weight.T; `rows_out` is the whole model's, the recorded op is this shard's.

        A weight cut along "in" gives a partial sum: follow it with `all_reduce`.
        """
        if shard == "out":
            rows_out = self.shard.part(rows_out, weight)
        bias_name = weight.removesuffix(".weight") + ".bias" if bias else None
        self._use(WeightUse(weight, (rows_out, self.width(x)), shard))
        if bias_name:
            self._use(WeightUse(bias_name, (rows_out,), shard, role="vector"))
        out = self._value(rows_out)
        self._ops.append(ops.Linear(out, x, weight, rows_out, self.width(x), bias_name, shard))
        return out

    def rope(self, x: Value, head_dim: int, name: str, table: Float32Array, factor: float = 1.0) -> Value:
        """Rotary position embedding with inverse frequencies `table` [rotary / 2]."""
        self._constants[name] = table
        out = self._value(self.width(x))
        self._ops.append(ops.Rope(out, x, self.width(x) // head_dim, head_dim, name, factor))
        return out

    def kv_write(self, k: Value, v: Value, group: int, layer: int) -> None:
        """Store the rows' keys and values."""
        self._ops.append(ops.KVWrite(k, v, group, layer))

    def attention(
        self,
        q: Value,
        group: int,
        layer: int,
        scale: float,
        *,
        mask: ops.MaskKind = ops.MaskKind.CAUSAL,
        softcap: float | None = None,
        start: int = 0,
        anchored: bool = False,
    ) -> Value:
        """Attention over a layer of a cache group; heads, widths and window follow from the group."""
        spec: CacheGroup = self.cache.groups[group]
        v_dim = spec.v_dim or spec.k_dim
        heads = self.width(q) // spec.k_dim
        out = self._value(heads * v_dim)
        self._ops.append(
            ops.Attention(
                out,
                q,
                group,
                layer,
                heads,
                spec.heads,
                spec.k_dim,
                v_dim,
                scale,
                mask,
                spec.window,
                softcap,
                start,
                anchored,
            )
        )
        return out

    def recurrence(self, x: Value, decay: str, group: int, layer: int) -> Value:
        """A decaying sum over the sequence, kept in a recurrent cache group."""
        self._use(WeightUse(decay, (self.width(x),), role="vector"))
        out = self._value(self.width(x))
        self._ops.append(ops.Recurrence(out, x, decay, group, layer))
        return out

    def gated(self, gate: Value, up: Value, activation: ops.Activation) -> Value:
        """activation(gate) * up."""
        out = self._value(self.width(gate))
        self._ops.append(ops.Gated(out, gate, up, activation))
        return out

    def add(self, a: Value, b: Value) -> Value:
        """a + b."""
        out = self._value(self.width(a))
        self._ops.append(ops.Add(out, a, b))
        return out

    def all_reduce(self, x: Value) -> Value:
        """Sum over the shards; records nothing when there is one."""
        if self.shard.size == 1:
            return x
        out = self._value(self.width(x))
        self._ops.append(ops.Collective(out, x, "all_reduce"))
        return out

    def hand_out(self, x: Value, name: str) -> None:
        """Hand x out of every step under a name."""
        self._ops.append(ops.Tap(x, name))

    def tap(self, x: Value, layer: int) -> None:
        """Offer x, the input of `layer`, as a hidden tap; recorded only if it was asked for."""
        if layer in self._wanted_taps:
            self._ops.append(ops.Tap(x, f"layer.{layer}"))

    def logits(
        self,
        x: Value,
        weight: str,
        vocabulary: int,
        *,
        softcap: float | None = None,
        bias: bool = False,
    ) -> Value:
        """Scores over the vocabulary for the rows that want them."""
        self._use(WeightUse(weight, (vocabulary, self.width(x))))
        bias_name = weight.removesuffix(".weight") + ".bias" if bias else None
        if bias_name:
            self._use(WeightUse(bias_name, (vocabulary,), role="vector"))
        out = self._value(vocabulary)
        self._vocabulary = vocabulary
        self._ops.append(ops.Logits(out, x, weight, vocabulary, self.width(x), softcap, bias_name))
        return out

    def sample(self, logits: Value) -> None:
        """Draw the next tokens inside the step."""
        self._ops.append(ops.Sample(logits))

    def program(self) -> Program:
        """What has been recorded."""
        return Program(
            tuple(self._ops),
            tuple(self._widths),
            dict(self._weights),
            dict(self._constants),
            self.cache,
            self._vocabulary,
            self.shard,
        )

    def _value(self, width: int) -> Value:
        self._widths.append(width)
        return len(self._widths) - 1

    def _use(self, use: WeightUse) -> None:
        known = self._weights.setdefault(use.name, use)
        if known.shape != use.shape:
            raise ValueError(f"{use.name} is used as {use.shape} and as {known.shape}")
        if known.role == "embedding":  # a tied head reads all of it
            self._weights[use.name] = use
