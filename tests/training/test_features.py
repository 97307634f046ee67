"""Features are serving's hidden states, bit for bit, however sequences are cut and packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.engine import Engine, LoadOptions, load_model
from slipstream.errors import UsageError
from slipstream.program.sampling import SamplingParams
from slipstream.speculation import Computed, Controller
from slipstream.training.features import FeatureSource
from tests.speculation.test_state import loaded

OPTIONS = LoadOptions(max_rows=64, threads=1)


def test_they_are_those_of_serving(tiny_gguf: Path, tmp_path: Path) -> None:
    """What a drafter is handed while an answer is made, in steps with others and with drafts, and what is computed."""
    model, drafter = loaded("eagle3", tiny_gguf, tmp_path)
    drafter.prior = lambda draft_class: 0.9  # type: ignore[method-assign]
    served: dict[tuple[int, int], np.ndarray] = {}
    commit = drafter.commit

    def watched(computed: Sequence[Computed]) -> None:
        for answer, start, tokens, taps in computed:
            assert taps is not None
            for place in range(tokens):
                served[answer.request, start + place] = taps[place].copy()
        commit(computed)

    drafter.commit = watched  # type: ignore[method-assign]
    engine = Engine(model, controller=Controller([drafter]), ahead=False)
    params = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    prompts = [list(range(9)), list(range(40, 140)), [5]]
    numbers = [engine.add(prompt, params) for prompt in prompts]
    said = [list(prompt) for prompt in prompts]
    while engine.busy:
        for chunk in engine.step():
            said[numbers.index(chunk.request)] += chunk.token_ids
    taps = drafter.needs.taps
    for options in (OPTIONS, LoadOptions(max_rows=17, threads=2, sequences=2, max_len=256)):
        source = FeatureSource(load_model(str(tiny_gguf), replace(options, taps=taps)), taps)
        found = source.compute(said)
        assert source.computed == sum(map(len, said))
        for request, tokens in enumerate(said):
            for position in range(len(tokens) - 1):
                assert np.array_equal(served[request, position], found[request][position])


def test_a_beginning_that_many_share_is_computed_once(tiny_gguf: Path) -> None:
    """The same bits, fewer rows; in a second call nothing of it is computed at all."""
    rng = np.random.default_rng(0)
    system = rng.integers(0, 256, 40).tolist()
    wanted = [[*system, *rng.integers(0, 256, n).tolist()] for n in (3, 30, 70, 9, 25, 1)]
    wanted += [rng.integers(0, 256, n).tolist() for n in (5, 50)]
    options = LoadOptions(max_rows=48, threads=1, sequences=3, max_len=160, taps=(0, 2))
    model = load_model(str(tiny_gguf), options)
    sharing, alone = FeatureSource(model, (0, 2)), FeatureSource(load_model(str(tiny_gguf), options), (0, 2))
    apart = [alone.compute([tokens])[0] for tokens in wanted]
    for _ in range(2):
        before = sharing.computed
        found = sharing.compute(wanted)
        assert all(np.array_equal(a, b) for a, b in zip(found, apart, strict=True))
    assert sharing.computed - before == sum(map(len, wanted)) - 6 * 32
    assert before == sharing.computed - before + 32


def test_others_may_use_the_cache_if_they_say_so(tiny_gguf: Path) -> None:
    rng = np.random.default_rng(1)
    wanted = [[*range(40, 90), *rng.integers(0, 256, 20).tolist()] for _ in range(5)]
    model = load_model(str(tiny_gguf), LoadOptions(max_rows=48, threads=1, sequences=3, max_len=160, taps=(0, 2)))
    source, engine = FeatureSource(model, (0, 2)), Engine(model)
    before = source.compute(wanted)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for seed in range(4):
        list(engine.run(engine.add(rng.integers(0, 256, 40 + seed).tolist(), params)))
    source.forget()
    assert all(np.array_equal(a, b) for a, b in zip(source.compute(wanted), before, strict=True))


def test_a_sequence_that_is_too_long_is_refused(tiny_gguf: Path) -> None:
    source = FeatureSource(load_model(str(tiny_gguf), LoadOptions(max_len=32, threads=1, taps=(0, 2))), (0, 2))
    assert source.compute([]) == []
    assert source.compute([[1], [2, 3]])[1].shape == (2, 128)
    with pytest.raises(UsageError, match="longer than 32"):
        source.compute([[1] * 33])
