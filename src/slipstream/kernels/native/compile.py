"""From a program's ops to the executor's fused instructions.

What is fused: a norm into the matrices that read it; matrices of one input; gate, up and activation; a
matrix and the addition of its result to the residual; norms and rotations of q and k, the writing of k
and v, and attention; a norm and the addition of its result. Anything else runs as an op of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import UnsupportedModelError
from slipstream.kernels.native import _native
from slipstream.kernels.native.cache import CacheArena
from slipstream.program import Program, ops
from slipstream.program.op_classes import linear_class
from slipstream.program.ops import Value

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Operands:
    """What instructions refer to: packed matrices and float vectors by name; the cache."""

    matrices: Mapping[str, _native.Matrix]
    vectors: Mapping[str, Float32Array]
    cache: CacheArena
    max_len: int


class Compiler:
    """One pass over the ops; values that are folded into a later instruction get no buffer."""

    def __init__(self, program: Program, operands: Operands, executor: _native.Executor):
        self.program, self.operands, self.executor = program, operands, executor
        self.consumers: dict[Value, list[int]] = defaultdict(list)
        for index, op in enumerate(program.ops):
            for value in _inputs(op):
                self.consumers[value].append(index)
        self.buffers: dict[Value, int] = {}
        self.free: dict[int, list[int]] = defaultdict(list)
        self.norms: dict[Value, ops.RMSNorm] = {}
        self.ropes: dict[Value, ops.Rope] = {}
        self.written: dict[tuple[int, int], ops.KVWrite] = {}
        self.done: set[int] = set()
        self.last_uses: dict[Value, int] = {}
        self.tables: dict[tuple[str, float], tuple[Float32Array, Float32Array]] = {}

    def compile(self) -> None:
        """Emit the whole program."""
        for index, op in enumerate(self.program.ops):
            if index not in self.done:
                self._emit(index, op)
            self._release(index)

    def _emit(self, index: int, op: ops.Op) -> None:
        match op:
            case ops.Embed():
                self.executor.embed(self._new(op.out), self.operands.matrices[op.table], op.scale)
            case ops.RMSNorm():
                self._norm(op)
            case ops.Linear():
                self._linears(index, op)
            case ops.Rope():
                self.ropes[op.out] = op
            case ops.KVWrite():
                self.written[op.group, op.layer] = op
                if self._attended(index) is None:
                    self._write(op)
            case ops.Attention():
                self._attention(op)
            case ops.Gated():
                gate, up = self.buffers[op.gate], self.buffers[op.up]
                self.executor.gated(gate, up, self._new(op.out), op.activation)
            case ops.Input():
                self.executor.input(self._new(op.out))
            case ops.Concat():
                self.executor.concat(self.buffers[op.a], self.buffers[op.b], self._new(op.out))
            case ops.Add():
                self.executor.add(self.buffers[op.a], self.buffers[op.b], self._new(op.out))
            case ops.Tap():
                self.executor.tap(self.buffers[op.x])
            case ops.Logits():
                x, norm, eps = self._normed(op.x)
                matrix, bias = self.operands.matrices[op.weight], self._vector(op.bias)
                self.executor.logits(x, norm, eps, matrix, bias, op.softcap or 0.0)
            case ops.Sample():
                pass
            case _:
                raise UnsupportedModelError(f"the native backend has no {type(op).__name__} yet")

    def _norm(self, op: ops.RMSNorm) -> None:
        kinds = {type(self.program.ops[user]) for user in self.consumers[op.out]}
        if (kinds <= {ops.Linear, ops.Logits} and op.heads == 1) or kinds == {ops.Rope}:
            self.norms[op.out] = op
            return
        add_index, residual = self._residual_add(op.out)
        weight, out = self.operands.vectors[op.weight], self._new(op.out)
        target = -1 if residual is None else self.buffers[residual]
        self.executor.norm(self.buffers[op.x], out, target, weight, op.eps, op.heads)
        if residual is not None:
            self._in_place(add_index, residual)

    def _linears(self, index: int, first: ops.Linear) -> None:
        group = [first]
        while isinstance(op := self.program.ops[index + len(group)], ops.Linear) and op.x == first.x:
            group.append(op)
        self.done.update(range(index, index + len(group)))
        x, norm, eps = self._normed(first.x)
        outs = [self._new(op.out) for op in group]
        epilogue, target, activation = "store", -1, "silu"
        following = self.program.ops[index + len(group)]
        add_index, residual = self._residual_add(first.out) if len(group) == 1 else (-1, None)
        if residual is not None:
            epilogue, target = "add_to", self.buffers[residual]
            self._in_place(add_index, residual)
        elif isinstance(following, ops.Gated) and [following.gate, following.up] == [op.out for op in group]:
            epilogue, target, activation = "gated", self._new(following.out), following.activation
            self.done.add(index + len(group))
        matrices = [self.operands.matrices[op.weight] for op in group]
        biases = [self._vector(op.bias) for op in group]
        op_class = linear_class(first.weight)
        self.executor.linear(x, norm, eps, matrices, biases, outs, epilogue, target, activation, op_class)

    def _attention(self, op: ops.Attention) -> None:
        spec, write = self.program.cache.groups[op.group], self.written[op.group, op.layer]
        if not spec.v_dim:
            raise UnsupportedModelError("the native backend has only attention with values yet")
        q_rope, k_rope = self.ropes[op.q], self.ropes[write.k]
        q, q_norm, eps = self._normed(q_rope.x)
        k, k_norm, _ = self._normed(k_rope.x)
        cosine, sine = self._angles(q_rope)
        self.executor.attention(
            q=q,
            k=k,
            v=self.buffers[write.v],
            out=self._new(op.out),
            heads=op.heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            cosine=cosine,
            sine=sine,
            **self._place(op.group, op.layer),
            scale=op.scale,
            softcap=op.softcap or 0.0,
            window=op.window or 0,
            start=op.start,
            block=op.mask is ops.MaskKind.BLOCK,
            anchored=op.anchored,
        )

    def _write(self, op: ops.KVWrite) -> None:
        """Keys and values that nothing in this program attends to."""
        rope = self.ropes[op.k]
        k, k_norm, eps = self._normed(rope.x)
        cosine, sine = self._angles(rope)
        self.executor.write(
            k=k, v=self.buffers[op.v], k_norm=k_norm, eps=eps, cosine=cosine, sine=sine,
            **self._place(op.group, op.layer),
        )  # fmt: skip

    def _place(self, group: int, layer: int) -> dict[str, Any]:
        """Where a layer's keys and values lie."""
        cache, spec = self.operands.cache, self.program.cache.groups[group]
        place = cache.places[group, layer]
        return {
            "cache": cache.data,
            "block_bytes": cache.block_bytes,
            "k_at": place.k,
            "v_at": place.v,
            "k_scale_at": place.k_scale,
            "v_scale_at": place.v_scale,
            "kv_heads": spec.heads,
            "k_dim": spec.k_dim,
            "v_dim": spec.v_dim,
            "int8": place.int8,
        }

    def _attended(self, index: int) -> int | None:
        """The attention that reads what a KVWrite writes, if there is one."""
        write = self.program.ops[index]
        assert isinstance(write, ops.KVWrite)
        return next(
            (
                at
                for at, other in enumerate(self.program.ops[index:], index)
                if isinstance(other, ops.Attention) and (other.group, other.layer) == (write.group, write.layer)
            ),
            None,
        )

    def _angles(self, op: ops.Rope) -> tuple[Float32Array, Float32Array]:
        """Cosines and sines [positions, half], shared by all layers that use the same table."""
        key = (op.table, op.factor)
        if key not in self.tables:
            positions = np.arange(self.operands.max_len, dtype=np.float32)[:, None]
            angle = positions * self.program.constants[op.table]
            factor = np.float32(op.factor)
            self.tables[key] = np.cos(angle) * factor, np.sin(angle) * factor
        return self.tables[key]

    def _residual_add(self, value: Value) -> tuple[int, Value | None]:
        """The Add that is this value's only use and the last use of its other operand, which it may overwrite."""
        users = self.consumers[value]
        if len(users) != 1 or not isinstance(add := self.program.ops[users[0]], ops.Add):
            return -1, None
        other = add.a if add.b == value else add.b
        if other == value or other not in self.buffers or max(self.consumers[other]) > users[0]:
            return -1, None
        return users[0], other

    def _in_place(self, add_index: int, residual: Value) -> None:
        """The Add's result takes over the residual's buffer."""
        add = self.program.ops[add_index]
        assert isinstance(add, ops.Add)
        self.buffers[add.out] = self.buffers.pop(residual)
        self.done.add(add_index)

    def _normed(self, value: Value) -> tuple[int, Float32Array | None, float]:
        """(buffer, weight of a norm that is folded in or None, its epsilon)."""
        norm = self.norms.get(value)
        if norm is None:
            return self.buffers[value], None, 0.0
        return self.buffers[norm.x], self.operands.vectors[norm.weight], norm.eps

    def _vector(self, name: str | None) -> Float32Array | None:
        return None if name is None else self.operands.vectors[name]

    def _new(self, value: Value) -> int:
        width = self.program.widths[value]
        pool = self.free[width]
        self.buffers[value] = pool.pop() if pool else self.executor.buffer(width)
        return self.buffers[value]

    def _release(self, index: int) -> None:
        """Give back the buffers whose values nothing after `index` reads."""
        for value in [v for v in self.buffers if self._last_use(v) <= index]:
            self.free[self.program.widths[value]].append(self.buffers.pop(value))

    def _last_use(self, value: Value) -> int:
        """Index of the op whose instruction reads the value last, through what is folded into it."""
        if value not in self.last_uses:
            self.last_uses[value] = self._find_last_use(value)
        return self.last_uses[value]

    def _find_last_use(self, value: Value) -> int:
        last = -1
        for user in self.consumers[value]:
            op = self.program.ops[user]
            if isinstance(op, ops.KVWrite):
                attended = self._attended(user)
                user = user if attended is None else attended
            elif isinstance(op, ops.Rope | ops.RMSNorm):
                user = max(user, self._last_use(op.out))
            last = max(last, user)
        return last


def _inputs(op: ops.Op) -> tuple[Value, ...]:
    match op:
        case ops.RMSNorm() | ops.Linear() | ops.Rope() | ops.Recurrence() | ops.Collective():
            return (op.x,)
        case ops.Tap() | ops.Logits():
            return (op.x,)
        case ops.KVWrite():
            return (op.k, op.v)
        case ops.Attention():
            return (op.q,)
        case ops.Gated():
            return (op.gate, op.up)
        case ops.Add() | ops.Concat():
            return (op.a, op.b)
        case ops.Sample():
            return (op.logits,)
        case ops.Embed() | ops.Input():
            return ()
