"""Replays a program op by op in numpy: the oracle of every other backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from slipstream.kernels.backend import StepOutput, checked_inputs
from slipstream.kernels.context import row_slots, visible_slots
from slipstream.kernels.immediate import Immediate
from slipstream.kernels.reference.cache import GroupCache
from slipstream.kernels.reference.sampling import draw
from slipstream.models.weights import WeightSource
from slipstream.program import NO_PARENT, Program, Rows, ops
from slipstream.program.sampling import DrawColumns, Drawn

Float32Array = npt.NDArray[np.float32]
Collectives = Callable[[ops.Collective, Float32Array], Float32Array]


def activation(x: Float32Array, kind: ops.Activation) -> Float32Array:
    """silu, or gelu in its tanh form."""
    if kind == "silu":
        return (x / (1 + np.exp(-x))).astype(np.float32)
    inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x**3)
    return (0.5 * x * (1 + np.tanh(inner))).astype(np.float32)


def _no_collectives(op: ops.Collective, x: Float32Array) -> Float32Array:
    raise ValueError("a sharded program needs a collective function")


class ReferenceExecutable(Immediate):
    """A program with float32 weights. `collective` joins the shards of a sharded program."""

    numerics = "reference-float32"

    def __init__(
        self,
        program: Program,
        weights: WeightSource,
        blocks: int,
        collective: Collectives = _no_collectives,
    ):
        super().__init__()
        self.program, self.source = program, weights
        self.weights = {name: weights.float32(use, program.shard) for name, use in program.weights.items()}
        self.cache = [GroupCache(group, blocks) for group in program.cache]
        self.collective = collective

    def sibling(self, program: Program) -> ReferenceExecutable:
        """Another program over the same weights and cache."""
        other = ReferenceExecutable(program, self.source, 0, self.collective)
        other.cache = self.cache
        return other

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices but embeddings that are only looked up."""
        uses = self.program.weights
        return sum(w.nbytes for name, w in self.weights.items() if uses[name].role != "embedding")

    def copy_blocks(self, pairs: npt.NDArray[np.int32]) -> None:
        """Copy cache blocks, pairs [n, 2] of (from, to)."""
        for cache in self.cache:
            cache.copy(pairs)

    def copy_slots(self, pairs: npt.NDArray[np.int32]) -> None:
        """Copy single slots of all layers, pairs [n, 2] of (from, to) in order."""
        for cache in self.cache:
            cache.copy_slots(pairs)

    def step(
        self,
        rows: Rows,
        draws: DrawColumns | None,
        *,
        logits: bool = False,
        inputs: Float32Array | None = None,
    ) -> StepOutput:
        """Run the ops in order over the rows."""
        values: dict[int, Float32Array] = {}
        taps: dict[str, Float32Array] = {}
        scores: Float32Array | None = None
        drawn: Drawn | None = None
        for op in self.program.ops:
            match op:
                case ops.KVWrite():
                    self.cache[op.group].write(op.layer, rows.slot, values[op.k], values[op.v])
                case ops.Input():
                    values[op.out] = checked_inputs(inputs, len(rows), op.width)
                case ops.Tap():
                    taps[op.name] = values[op.x]
                case ops.Logits():
                    scores = self._logits(op, values[op.x][rows.logit_rows])
                case ops.Sample():
                    if draws is not None and scores is not None:
                        drawn = draw(scores, draws, self.ids)
                case _:
                    values[op.out] = self._compute(op, values, rows)
        self._scores = scores
        return StepOutput(drawn, scores if logits else None, taps)

    def _compute(self, op: ops.Op, values: Mapping[int, Float32Array], rows: Rows) -> Float32Array:
        w = self.weights
        match op:
            case ops.Embed():
                return w[op.table][rows.token] * np.float32(op.scale)
            case ops.RMSNorm():
                x = values[op.x].reshape(len(rows), op.heads, -1)
                mean = np.mean(x * x, axis=-1, keepdims=True)
                normed = x / np.sqrt(mean + np.float32(op.eps)) * w[op.weight]
                return normed.reshape(len(rows), -1)
            case ops.Linear():
                out = values[op.x] @ w[op.weight].T
                return out + w[op.bias] if op.bias else out
            case ops.Rope():
                return self._rope(op, values[op.x], rows)
            case ops.Attention():
                return self._attention(op, values[op.q], rows)
            case ops.Recurrence():
                return self._recurrence(op, values[op.x], rows)
            case ops.Gated():
                return activation(values[op.gate], op.activation) * values[op.up]
            case ops.Add():
                return values[op.a] + values[op.b]
            case ops.Concat():
                return np.concatenate([values[op.a], values[op.b]], axis=-1)
            case ops.Collective():
                return self.collective(op, values[op.x])
        raise TypeError(f"no such op: {op}")

    def _rope(self, op: ops.Rope, x: Float32Array, rows: Rows) -> Float32Array:
        table = self.program.constants[op.table]
        angle = rows.position[:, None].astype(np.float32) * table
        cos = (np.cos(angle) * np.float32(op.factor))[:, None]
        sin = (np.sin(angle) * np.float32(op.factor))[:, None]
        half = len(table)
        heads = x.reshape(len(rows), op.heads, op.head_dim)
        low, high, rest = np.split(heads, [half, 2 * half], axis=-1)
        rotated = [low * cos - high * sin, high * cos + low * sin, rest]
        return np.concatenate(rotated, axis=-1).reshape(len(rows), -1)

    def _attention(self, op: ops.Attention, q: Float32Array, rows: Rows) -> Float32Array:
        cache = self.cache[op.group]
        queries = q.reshape(len(rows), op.kv_heads, op.heads // op.kv_heads, op.k_dim)
        out = np.empty((len(rows), op.heads * op.v_dim), np.float32)
        for index in range(len(rows)):
            slots = visible_slots(rows, index, op)
            k, v = cache.k[op.layer, slots], cache.values(op.layer, slots)
            scores = np.einsum("hgd,thd->hgt", queries[index], k) * np.float32(op.scale)
            if op.softcap:
                scores = op.softcap * np.tanh(scores / np.float32(op.softcap))
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[index] = np.einsum("hgt,thd->hgd", weights, v).reshape(-1)
        return out

    def _recurrence(self, op: ops.Recurrence, x: Float32Array, rows: Rows) -> Float32Array:
        state = self.cache[op.group].state[op.layer]
        for index in range(len(rows)):
            parent = rows.parent[index]
            if parent != NO_PARENT:
                before = state[rows.slot[parent]]
            elif rows.position[index] == 0:
                before = np.zeros_like(x[index])
            else:
                before = state[row_slots(rows, index)[-2]]
            state[rows.slot[index]] = self.weights[op.decay] * before + x[index]
        return state[rows.slot]

    def _logits(self, op: ops.Logits, x: Float32Array) -> Float32Array:
        scores = x @ self.weights[op.weight].T
        if op.bias:
            scores = scores + self.weights[op.bias]
        if op.softcap:
            scores = op.softcap * np.tanh(scores / np.float32(op.softcap))
        return np.ascontiguousarray(scores, np.float32)


class ReferenceBackend:
    """Compiles nothing: the ops are interpreted."""

    name = "reference"

    def compile(self, program: Program, weights: WeightSource, blocks: int, spare: int = 0) -> ReferenceExecutable:
        """Load the weights as float32 and set up the cache."""
        return ReferenceExecutable(program, weights, blocks + spare)
