"""A chain of draws in one call is the chain step by step: tokens, log-probabilities, and where it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.kernels.backend import Worth
from slipstream.kernels.immediate import Immediate
from slipstream.program import NO_PARENT, Rows
from slipstream.program.sampling import Draw, DrawColumns, SamplingParams
from slipstream.speculation.settings import BOUNDS, PRIORS
from tests.speculation.test_state import loaded

SLOTS = np.array([40, 41, 70, 71, 72, 99], np.int32)
ALL = Worth(BOUNDS, np.ones(len(PRIORS)), 1.0, 0.0)


@pytest.fixture(scope="module")
def executable(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    _, drafter = loaded("eagle3", tiny_gguf, tmp_path_factory.mktemp("drafter"))
    over_hidden: Any = drafter.over_hidden  # type: ignore[attr-defined]
    return over_hidden


def begun(count: int = 1) -> Rows:
    """The row of position 8, whose predecessors lie in the first block."""
    columns = [[0] * count, [5] * count, [8] * count, [8 + i for i in range(count)], [NO_PARENT] * count]
    return Rows.of_columns(columns, [0], [[0, 1, 2, 3]])


def draws(temperature: float) -> DrawColumns:
    params = SamplingParams(temperature=temperature, logprobs=2)
    return DrawColumns.of([Draw(params, 7, 0, 9)])


def hidden(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((1, 64)).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_in_one_call(executable: Any, temperature: float) -> None:
    for seed in range(5):
        inputs, settings = hidden(seed), draws(temperature)
        chain = executable.follow(begun(), settings, inputs, SLOTS, ALL)
        steps = Immediate.follow(executable, begun(), settings, inputs, SLOTS, ALL)
        assert chain.tokens.shape == (6, 3)
        assert np.array_equal(chain.tokens, steps.tokens)
        assert np.array_equal(chain.logprobs, steps.logprobs)
        assert settings.position[0] == 9, "the caller's draws are left alone"


def test_it_ends_where_it_is_not_worth_more(executable: Any) -> None:
    inputs, ends = hidden(1), set()
    for price in (0.9, 0.5, 0.2, 0.05, 0.01, 1e-4):
        worth = Worth(BOUNDS, np.array(PRIORS), 0.9, price)
        chain = executable.follow(begun(), draws(1.0), inputs, SLOTS, worth)
        steps = Immediate.follow(executable, begun(), draws(1.0), inputs, SLOTS, worth)
        assert np.array_equal(chain.tokens, steps.tokens)
        ends.add(len(chain.tokens))
    assert len(ends) > 2
    assert min(ends) == 1


def test_wrong_use(executable: Any) -> None:
    inputs = hidden(0)
    for follow in (executable.follow, lambda *given: Immediate.follow(executable, *given)):
        with pytest.raises(ValueError, match="one row"):
            follow(begun(2), draws(0.0), inputs, SLOTS, ALL)
        with pytest.raises(ValueError, match="takes numbers"):
            follow(begun(), draws(0.0), inputs[:, :8], SLOTS, ALL)
    with pytest.raises(ValueError, match="a chance for every class"):
        executable.follow(begun(), draws(0.0), inputs, SLOTS, ALL._replace(chances=np.ones(3)))
    with pytest.raises(RuntimeError, match="slot"):
        executable.follow(begun(), draws(0.0), inputs, np.array([1 << 20], np.int32), ALL)
