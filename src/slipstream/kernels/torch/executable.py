"""Replays a program op by op in torch, in float32 or bfloat16, on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream.errors import UnsupportedModelError, UsageError
from slipstream.kernels.backend import StepOutput, checked_inputs
from slipstream.kernels.context import visible_slots
from slipstream.kernels.immediate import Immediate
from slipstream.kernels.reference.sampling import draw
from slipstream.models.weights import WeightSource
from slipstream.program import BLOCK_SLOTS, GroupKind, Program, Rows, ops
from slipstream.program.ops import MaskKind
from slipstream.program.sampling import DrawColumns

Tensor = torch.Tensor


def activation(x: Tensor, kind: ops.Activation) -> Tensor:
    """silu, or gelu in its tanh form."""
    functional = torch.nn.functional
    return functional.silu(x) if kind == "silu" else functional.gelu(x, approximate="tanh")


class TorchExecutable(Immediate):
    """A program with its weights and cache as tensors of one dtype on one device."""

    def __init__(self, program: Program, weights: WeightSource, blocks: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.program, self.source, self.device, self.dtype = program, weights, device, dtype
        self.weights = {
            name: self._tensor(weights.float32(use, program.shard)).to(dtype) for name, use in program.weights.items()
        }
        slots = blocks * BLOCK_SLOTS
        self.cache: list[tuple[Tensor, Tensor]] = []
        for group in program.cache:
            if group.kind is GroupKind.RECURRENT:
                raise UnsupportedModelError("the torch backend has no recurrent state yet")
            shape = (group.layers, slots, group.heads)
            self.cache.append(
                (
                    torch.zeros(*shape, group.k_dim, device=device, dtype=dtype),
                    torch.zeros(*shape, group.v_dim or group.k_dim, device=device, dtype=dtype),
                )
            )

    def sibling(self, program: Program) -> TorchExecutable:
        """Another program over the same weights and cache."""
        other = TorchExecutable(program, self.source, 0, self.device, self.dtype)
        other.cache = self.cache
        return other

    @property
    def numerics(self) -> str:
        """Device and dtype."""
        return f"torch-{torch.__version__}-{self.device.type}-{self.dtype}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices but embeddings that are only looked up."""
        uses = self.program.weights
        return sum(w.nbytes for name, w in self.weights.items() if uses[name].role != "embedding")

    def copy_blocks(self, pairs: npt.NDArray[np.int32]) -> None:
        """Copy cache blocks, pairs [n, 2] of (from, to)."""
        for arrays in self.cache:
            for array in arrays:
                blocks = array.view(array.shape[0], -1, BLOCK_SLOTS, *array.shape[2:])
                blocks[:, pairs[:, 1]] = blocks[:, pairs[:, 0]].clone()

    def copy_slots(self, pairs: npt.NDArray[np.int32]) -> None:
        """Copy single slots of all layers, pairs [n, 2] of (from, to) in order."""
        for arrays in self.cache:
            for array in arrays:
                for source, to in pairs.tolist():
                    array[:, to] = array[:, source]

    @torch.inference_mode()
    def step(
        self,
        rows: Rows,
        draws: DrawColumns | None,
        *,
        logits: bool = False,
        inputs: npt.NDArray[np.float32] | None = None,
    ) -> StepOutput:
        """Run the ops in order over the rows."""
        values: dict[int, Tensor] = {}
        taps: dict[str, npt.NDArray[np.float32]] = {}
        scores: npt.NDArray[np.float32] | None = None
        contexts = _Contexts(rows, self.device)
        for op in self.program.ops:
            match op:
                case ops.KVWrite():
                    self._write(op, values, rows)
                case ops.Input():
                    handed = self._tensor(checked_inputs(inputs, len(rows), op.width))
                    values[op.out] = handed.to(self.dtype)
                case ops.Tap():
                    taps[op.name] = values[op.x].float().cpu().numpy()
                case ops.Logits():
                    wanted = values[op.x][torch.from_numpy(rows.logit_rows).long().to(self.device)]
                    scores = self._logits(op, wanted).float().cpu().numpy()
                case ops.Sample():
                    pass
                case _:
                    values[op.out] = self._compute(op, values, rows, contexts)
        drawn = draw(scores, draws, self.ids) if draws is not None and scores is not None else None
        self._scores = scores
        return StepOutput(drawn, scores if logits else None, taps)

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _write(self, op: ops.KVWrite, values: Mapping[int, Tensor], rows: Rows) -> None:
        slots = self._tensor(rows.slot).long()
        for array, value in zip(self.cache[op.group], (values[op.k], values[op.v]), strict=True):
            array[op.layer, slots] = value.view(len(rows), *array.shape[2:])

    def _compute(self, op: ops.Op, values: Mapping[int, Tensor], rows: Rows, contexts: _Contexts) -> Tensor:
        w = self.weights
        match op:
            case ops.Embed():
                return w[op.table][self._tensor(rows.token).long()] * op.scale
            case ops.RMSNorm():
                x = values[op.x].float().view(len(rows), op.heads, -1)
                normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + op.eps)
                return (normed * w[op.weight].float()).to(self.dtype).view(len(rows), -1)
            case ops.Linear():
                bias = w[op.bias] if op.bias else None
                return torch.nn.functional.linear(values[op.x], w[op.weight], bias)
            case ops.Rope():
                return self._rope(op, values[op.x], rows)
            case ops.Attention():
                return self._attention(op, values[op.q], contexts)
            case ops.Gated():
                return activation(values[op.gate], op.activation) * values[op.up]
            case ops.Add():
                return values[op.a] + values[op.b]
            case ops.Concat():
                return torch.cat([values[op.a], values[op.b]], -1)
        raise UnsupportedModelError(f"the torch backend has no {type(op).__name__} yet")

    def _rope(self, op: ops.Rope, x: Tensor, rows: Rows) -> Tensor:
        table = self._tensor(self.program.constants[op.table])
        angle = self._tensor(rows.position).float()[:, None] * table
        cos, sin = (angle.cos() * op.factor)[:, None], (angle.sin() * op.factor)[:, None]
        half = len(table)
        heads = x.float().view(len(rows), op.heads, op.head_dim)
        low, high, rest = torch.split(heads, [half, half, op.head_dim - 2 * half], -1)
        rotated = torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)
        return rotated.to(self.dtype).view(len(rows), -1)

    def _attention(self, op: ops.Attention, q: Tensor, contexts: _Contexts) -> Tensor:
        k_cache, v_cache = self.cache[op.group]
        slots, visible = contexts.of(op)
        rows = len(q)
        k, v = k_cache[op.layer, slots], v_cache[op.layer, slots]  # [rows, context, heads, width]
        v = v.masked_fill(~visible[:, :, None, None], 0)  # a weight of 0 does not silence an infinity
        queries = q.view(rows, op.kv_heads, op.heads // op.kv_heads, op.k_dim)
        scores = torch.einsum("rhgd,rthd->rhgt", queries.float(), k.float()) * op.scale
        if op.softcap:
            scores = op.softcap * torch.tanh(scores / op.softcap)
        scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
        out = torch.einsum("rhgt,rthd->rhgd", scores.softmax(-1), v.float())
        return out.reshape(rows, -1).to(self.dtype)

    def _logits(self, op: ops.Logits, x: Tensor) -> Tensor:
        bias = self.weights[op.bias] if op.bias else None
        scores = torch.nn.functional.linear(x, self.weights[op.weight], bias).float()
        return op.softcap * torch.tanh(scores / op.softcap) if op.softcap else scores


class _Contexts:
    """The slots each row sees, padded to the longest, made once per step and mask."""

    def __init__(self, rows: Rows, device: torch.device):
        self._rows, self._device = rows, device
        self._made: dict[tuple[MaskKind, int | None, int, bool], tuple[Tensor, Tensor]] = {}

    def of(self, op: ops.Attention) -> tuple[Tensor, Tensor]:
        """(slots [rows, context], which of them are visible) for an attention op."""
        key = (op.mask, op.window, op.start, op.anchored)
        if key not in self._made:
            lists = [visible_slots(self._rows, index, op) for index in range(len(self._rows))]
            longest = max(map(len, lists))
            slots = np.zeros((len(lists), longest), np.int64)
            visible = np.zeros((len(lists), longest), np.bool_)
            for index, entries in enumerate(lists):
                slots[index, : len(entries)], visible[index, : len(entries)] = entries, True
            self._made[key] = (
                torch.from_numpy(slots).to(self._device),
                torch.from_numpy(visible).to(self._device),
            )
        return self._made[key]


class TorchBackend:
    """Runs programs eagerly. `device` and `dtype` are torch's; by default a GPU if there is one, and float32."""

    name = "torch"

    def __init__(self, device: str | None = None, dtype: torch.dtype = torch.float32):
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.dtype = dtype

    def compile(self, program: Program, weights: WeightSource, blocks: int, spare: int = 0) -> TorchExecutable:
        """Load the weights and set up the cache."""
        return TorchExecutable(program, weights, blocks + spare, self.device, self.dtype)


def named(setting: str) -> TorchBackend:
    """The backend by what follows its name: a device, or bf16, or both with a colon between. Raises UsageError."""
    device, _, last = setting.rpartition(":")
    if last != "bf16":
        device, last = setting, ""
    try:
        return TorchBackend(device or None, torch.bfloat16 if last else torch.float32)
    except RuntimeError as error:
        raise UsageError(f"torch has no device {device!r}: cpu, cuda or cuda:1, with :bf16 after it or not") from error
