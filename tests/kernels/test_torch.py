"""The torch backend against the numpy reference, and in bfloat16 near it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.kernels.reference import ReferenceBackend
from slipstream.kernels.torch import TorchBackend
from slipstream.models import ModelConfig, record_program
from slipstream.program import KVFormat, Row, Rows
from slipstream.program.sampling import Draw, DrawColumns, SamplingParams
from tests import toys
from tests.program.test_toys import random_weights
from tests.stepping import run_alone

TOKENS = [int(t) for t in np.random.default_rng(2).integers(0, toys.VOCABULARY, 70)]


@pytest.mark.parametrize("config", [toys.PLAIN, toys.WINDOWED], ids=["plain", "windowed"])
def test_equals_reference(config: ModelConfig) -> None:
    program = record_program(config, kv_format=KVFormat.F32, taps=(1,))
    weights = random_weights(program)
    expected = run_alone(ReferenceBackend().compile(program, weights, 4), TOKENS)
    actual = run_alone(TorchBackend("cpu").compile(program, weights, 4), TOKENS, chunk=13)
    assert np.abs(actual - expected).max() < 1e-3
    low = run_alone(TorchBackend("cpu", torch.bfloat16).compile(program, weights, 4), TOKENS)
    assert np.corrcoef(low.reshape(-1), expected.reshape(-1))[0, 1] > 0.99


def test_draws_taps_and_copies() -> None:
    program = record_program(toys.PLAIN, kv_format=KVFormat.F32, taps=(0, 2))
    weights = random_weights(program)
    rows = Rows.of([Row(0, t, i, i, i - 1, i == 2) for i, t in enumerate((3, 4, 5))], [[0]])
    draws = DrawColumns.of([Draw(SamplingParams(), 5, 0, 3)])
    ours = TorchBackend("cpu").compile(program, weights, 2)
    reference = ReferenceBackend().compile(program, weights, 2)
    a, b = ours.step(rows, draws), reference.step(rows, draws)
    assert a.drawn is not None
    assert b.drawn is not None
    assert a.drawn.token.tolist() == b.drawn.token.tolist()
    assert all(np.allclose(a.taps[name], b.taps[name], atol=1e-4) for name in b.taps)
    ours.copy_blocks(np.array([[0, 1]], np.int32))
    again = ours.step(Rows.of([Row(0, 6, 3, 35, -1, True)], [[1]]), None, logits=True).logits
    wanted = reference.step(Rows.of([Row(0, 6, 3, 3, -1, True)], [[0]]), None, logits=True).logits
    assert again is not None
    assert wanted is not None
    assert np.allclose(again, wanted, atol=1e-3)
