"""Scoring: the reference's log-probabilities, chunk by chunk, while answers go on, and nothing of the cache is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slipstream.engine import Engine, LoadOptions, Model, TokenLogprob, load_model
from slipstream.engine.scoring import Scorer, logprobs_of
from slipstream.errors import UsageError
from slipstream.precision.quality import scores_of
from slipstream.program.sampling import SamplingParams
from slipstream.text.grammars import of_regex
from tests.engine.test_jitter import collect

TEXTS = [[1], [1, 2], [n % 256 for n in range(33)], [n * 7 % 256 for n in range(150)]]


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Model:
    return load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1))


def scored(engine: Engine, texts: list[list[int]], top: int) -> list[list[TokenLogprob]]:
    scorer = Scorer(engine)
    scorer.add(1, texts, top)
    while (done := scorer.step()) is None:
        engine.check()
    engine.check()
    assert not scorer.busy
    assert engine.pool.available == engine.pool.size
    return done[1]


def test_they_are_the_references(tiny_gguf: Path) -> None:
    reference = load_model(str(tiny_gguf), LoadOptions(backend="reference", max_rows=64))
    for tokens, found in zip(TEXTS, scored(Engine(reference), TEXTS, 4), strict=True):
        logits = scores_of(reference.executable)(tokens, 0, len(tokens))[:-1].astype(np.float64)
        wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert [entry.token for entry in found] == tokens[1:]
        for entry, row in zip(found, wanted, strict=True):
            assert entry.logprob == pytest.approx(row[entry.token], abs=1e-4)
            assert [token for token, _ in entry.top] == [*np.argsort(-row)[:4]]
            assert [value for _, value in entry.top] == pytest.approx([*-np.sort(-row)[:4]], abs=1e-4)


def test_numbers_that_are_far_apart() -> None:
    logits = np.array([[1e30, 0.0, -1e30], [-80.0, -81.0, -200.0]], np.float32)
    first, second = logprobs_of(logits, [0, 2], 2)
    assert (first.logprob, [token for token, _ in first.top]) == (0.0, [0, 1])
    assert second.logprob == pytest.approx(-120.0 - np.log1p(np.exp(-1.0)))
    assert logprobs_of(logits[:0], [], 2) == []
    assert [entry.top for entry in logprobs_of(logits, [1, 1], 0)] == [(), ()]


@pytest.mark.parametrize("grammar", ["", of_regex("[a-z]{40}")])
def test_answers_go_on_meanwhile(model: Model, grammar: str) -> None:
    """Plain ones and those under a grammar, planned ahead or not; the scores are the same, too."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, grammar=grammar, logprobs=1)
    plain = Engine(model)
    alone = collect(plain.run(plain.add([5, 6, 7], params)))
    scores = scored(plain, TEXTS, 2)
    for ahead in (False, True):
        engine = Engine(model, ahead=ahead)
        scorer = Scorer(engine)
        scorer.add(1, TEXTS * 3, 2)
        number, chunks, done = engine.add([5, 6, 7], params), [], None
        while engine.busy or scorer.busy:
            chunks += engine.step() if engine.busy else []
            if scorer.busy:
                done = scorer.step()
            engine.check()
        assert collect(chunk for chunk in chunks if chunk.request == number) == alone
        assert done == (1, scores * 3)


def test_a_job_can_be_dropped(model: Model) -> None:
    engine = Engine(model)
    scorer = Scorer(engine)
    scorer.add(1, [TEXTS[-1]], 2)
    scorer.step()
    scorer.drop(1)
    engine.check()
    assert not scorer.busy
    for text in ([], [1] * 600, [999], [-1]):
        with pytest.raises(UsageError):
            scorer.add(2, [text], 0)
