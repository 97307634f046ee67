"""Every packed format on every instruction set: the products are those of the unpacked weights, in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from slipstream.kernels.native import NativeBackend, NativeExecutable, _native
from slipstream.models.weights import ArrayWeights
from slipstream.program import CacheGroup, CacheSpec, GroupKind, Recorder, Row, Rows
from tests.kernels.emulated import int8_groups

ISAS = [*_native.available_isas(), *_native.emulated_isas()]
FORMATS = ["i4s", "i4s64", "i4s128", "i4m", "i4m64", "i4m128", "i5s", "i5m", "i8"]
INPUTS, OUTPUTS, ROWS = 200, 83, 64
"""Inputs that fill no group, outputs that fill no panel."""


@pytest.fixture(autouse=True)
def _restore_isa() -> Iterator[None]:
    before = _native.isa()
    yield
    _native.select_isa(before)


def linear(packed: str, inputs: np.ndarray, weights: np.ndarray) -> tuple[NativeExecutable, np.ndarray]:
    """(a program whose token t is row t of `inputs` and whose logits are its products, the weights as packed)."""
    matrix = _native.Matrix(packed, OUTPUTS, INPUTS, _native.allocate(_native.packed_bytes(packed, OUTPUTS, INPUTS)))
    rows = np.arange(OUTPUTS, dtype=np.int64)
    _native.Packer(1).pack(0, weights.reshape(-1).view(np.uint8), INPUTS * 4, 0, rows, matrix)
    unpacked = np.empty_like(weights)
    for row, values in enumerate(unpacked):
        matrix.unpack_row(row, values)
    p = Recorder(CacheSpec((CacheGroup(GroupKind.FULL, 1, 1, 16, 16),)))
    p.sample(p.logits(p.linear(p.embed("table", ROWS, INPUTS), "weight", OUTPUTS), "head", OUTPUTS))
    source = ArrayWeights({"table": inputs, "head": np.eye(OUTPUTS, dtype=np.float32), "weight": weights})
    return NativeBackend(2, ROWS, matrices={"weight": matrix}).compile(p.program(), source, ROWS), unpacked


def step(executable: NativeExecutable, tokens: list[int]) -> np.ndarray:
    rows = [Row(at, token, 0, at * 32, -1, True) for at, token in enumerate(tokens)]
    logits = executable.step(Rows.of(rows, [[at] for at in range(len(tokens))]), None, logits=True).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("packed", FORMATS)
def test_products(packed: str, isa: str) -> None:
    _native.select_isa(isa)
    rng = np.random.default_rng(11)
    inputs = rng.standard_normal((ROWS, INPUTS)).astype(np.float32)
    weights = rng.standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
    executable, unpacked = linear(packed, inputs, weights)
    together = step(executable, [*range(ROWS)])
    wanted = int8_groups(inputs) @ unpacked.T
    assert np.abs(together - wanted).max() < 2e-2 < np.abs(inputs @ weights.T - wanted).max()
    for count in (1, 2, 4, 9, 17, 33):
        assert np.array_equal(step(executable, [*range(count)]), together[:count])
