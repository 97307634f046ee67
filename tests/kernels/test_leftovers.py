"""What another request left in the caches and buffers, infinities too, is in nobody's answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from slipstream.kernels import Executable
from slipstream.kernels.native import NativeBackend, _native
from slipstream.kernels.native.packing import Quantization
from slipstream.kernels.reference import ReferenceBackend
from slipstream.models import record_program
from slipstream.program import KVFormat, Program, ShardPlan, WeightUse
from tests import toys
from tests.blocks import BlockWeights
from tests.stepping import Sequence, advance, run_alone

ISAS = [*_native.available_isas(), *_native.emulated_isas()]
POISON = 0
"""Its embedding is infinite, and so is, or is not a number, all that comes of it."""
ODD = replace(toys.PLAIN, hidden=72, ffn=104, tied_head=False, qkv_bias=False)
"""Widths that fill no group of 32, and no unit of 128."""


@pytest.fixture(autouse=True)
def _restore_isa() -> Iterator[None]:
    before = _native.isa()
    yield
    _native.select_isa(before)


def poisoned_weights(program: Program) -> BlockWeights:
    weights = BlockWeights("F32")
    shape = program.weights["embed.weight"].shape
    embedding = weights.stored(WeightUse("embed.weight", shape), ShardPlan())
    embedding.tensor.data.view(np.float32).reshape(shape)[POISON] = np.inf
    return weights


def nothing_is_left_over(executable: Executable) -> None:
    """Runs a prompt before and after one of poison in the same blocks and another."""
    prompt = [int(t) for t in np.random.default_rng(0).integers(1, toys.VOCABULARY, 40)]

    def answer() -> np.ndarray:
        sequence = Sequence(prompt, [2, 1])
        while sequence.computed < len(prompt):
            advance(executable, [(sequence, min(3, len(prompt) - sequence.computed))])
        return np.stack(sequence.logits)

    before = answer()
    assert np.isfinite(before).all()
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(run_alone(executable, [POISON] * 96)).any()
    assert np.array_equal(answer(), before)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_format", [KVFormat.BF16, KVFormat.INT8])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4-128"])
def test_native(quantization: Quantization, kv_format: KVFormat, isa: str) -> None:
    _native.select_isa(isa)
    program = record_program(ODD, kv_format=kv_format)
    nothing_is_left_over(NativeBackend(2, 96, quantization).compile(program, poisoned_weights(program), 8))


@pytest.mark.parametrize("isa", ISAS)
def test_native_windows(isa: str) -> None:
    """Positions before the window are masked like those after the last."""
    _native.select_isa(isa)
    program = record_program(replace(toys.WINDOWED, tied_head=False, final_softcap=None))
    nothing_is_left_over(NativeBackend(2, 96).compile(program, poisoned_weights(program), 8))


def test_reference() -> None:
    program = record_program(ODD)
    nothing_is_left_over(ReferenceBackend().compile(program, poisoned_weights(program), 8))


def test_torch() -> None:
    pytest.importorskip("torch")
    from slipstream.kernels.torch import TorchBackend

    program = record_program(ODD)
    nothing_is_left_over(TorchBackend("cpu").compile(program, poisoned_weights(program), 8))
