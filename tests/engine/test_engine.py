"""The engine: seeded answers that do not depend on company, stops, limits, choices, preemption."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.engine import Chunk, Engine, Model
from slipstream.errors import UsageError
from slipstream.program.sampling import SamplingParams

PROMPTS = ["hello", "the quick brown fox jumps", "a", "0123456789" * 9]


def answers(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[list[Chunk]]:
    """All chunks of all choices, requests running together; one list per (request, choice)."""
    numbers = [engine.add(prompt, params) for prompt, params in requests]
    collected: dict[tuple[int, int], list[Chunk]] = {}
    while engine.busy:
        for chunk in engine.step():
            collected.setdefault((chunk.request, chunk.choice), []).append(chunk)
        engine.check()
    return [collected[n, c] for n, (_, p) in zip(numbers, requests, strict=True) for c in range(p.n)]


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def logprobs_of(chunks: list[Chunk]) -> list[float]:
    return [entry.logprob for chunk in chunks for entry in chunk.logprobs]


def test_answers_do_not_depend_on_company_or_preemption(tiny_model: Model) -> None:
    params = [
        SamplingParams(seed=i, max_tokens=40, logprobs=2, temperature=t, top_p=p, presence_penalty=pp, ignore_eos=True)
        for i, (t, p, pp) in enumerate([(1.0, 1.0, 0.0), (0.7, 0.9, 1.0), (0.0, 1.0, 0.0), (1.3, 0.8, 0.0)])
    ]
    requests = [(tiny_model.tokenizer.encode(text), p) for text, p in zip(PROMPTS, params, strict=True)]
    alone = [answers(Engine(tiny_model), [request])[0] for request in requests]
    together = answers(Engine(tiny_model), requests)
    cramped = Engine(replace(tiny_model, blocks=7))  # too few for all: somebody is computed again
    preempted = answers(cramped, requests)
    for a, b, c in zip(alone, together, preempted, strict=True):
        assert tokens_of(a) == tokens_of(b) == tokens_of(c)
        assert logprobs_of(a) == logprobs_of(b) == logprobs_of(c)
    assert cramped.pool.available == 7


def test_choices_share_the_prompt_and_differ(tiny_model: Model) -> None:
    prompt = tiny_model.tokenizer.encode("0123456789" * 7)
    params = SamplingParams(seed=3, n=4, max_tokens=12, ignore_eos=True)
    engine = Engine(tiny_model)
    number = engine.add(prompt, params)
    engine.step()  # rows are limited to 64: a chunk of the prompt
    chunks = list(engine.run(number))
    engine.check()
    per_choice = {c: tokens_of([x for x in chunks if x.choice == c]) for c in range(4)}
    assert len({tuple(tokens) for tokens in per_choice.values()}) == 4
    assert all(len(tokens) == 12 for tokens in per_choice.values())
    first = answers(Engine(tiny_model), [(prompt, replace(params, n=1))])[0]
    assert tokens_of(first) == per_choice[0]
    assert engine.pool.available == engine.pool.size


def greedy(model: Model, text: str, **changes: object) -> list[Chunk]:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, **changes})  # type: ignore[arg-type]
    return answers(Engine(model), [(model.tokenizer.encode(text), params)])[0]


def test_every_way_to_stop(tiny_model: Model) -> None:
    plain = greedy(tiny_model, "hello")
    text, ids = "".join(c.text for c in plain), tokens_of(plain)
    assert (len(ids), plain[-1].finish_reason) == (30, "length")
    by_token = greedy(tiny_model, "hello", stop_token_ids=(ids[7],))
    assert tokens_of(by_token) == ids[: ids.index(ids[7]) + 1]
    assert (by_token[-1].finish_reason, by_token[-1].stop) == ("stop", ids[7])
    stop = text[4:7]
    by_text = greedy(tiny_model, "hello", stop=(stop,))
    assert "".join(c.text for c in by_text) == text[: text.find(stop)]
    assert (by_text[-1].finish_reason, by_text[-1].stop) == ("stop", stop)
    forced = greedy(tiny_model, "hello", allowed_tokens=(258,), ignore_eos=False)
    assert (tokens_of(forced), forced[-1].finish_reason, forced[-1].text) == ([258], "stop", "")
    unheeded = greedy(tiny_model, "hello", stop=(stop,), min_tokens=20)
    assert "".join(c.text for c in unheeded).startswith(text[:20]), "a stop string that does not count yet is text"
    late = greedy(tiny_model, "hello", logit_bias={258: 100.0}, ignore_eos=False, min_tokens=5)
    assert len(tokens_of(late)) == 6
    assert 258 not in tokens_of(late)[:-1]


def test_penalties_bans_and_logprobs(tiny_model: Model) -> None:
    ids = tokens_of(greedy(tiny_model, "hello"))
    assert ids[0] not in tokens_of(greedy(tiny_model, "hello", banned_tokens=(ids[0],)))
    repeated = tokens_of(greedy(tiny_model, "hello", allowed_tokens=(65, 66, 67)))
    spread = tokens_of(greedy(tiny_model, "hello", allowed_tokens=(65, 66, 67), frequency_penalty=2.0))
    assert set(repeated) <= {65, 66, 67}
    assert max(map(spread.count, spread)) < max(map(repeated.count, repeated))
    for chunk in greedy(tiny_model, "hello", logprobs=3):
        entry = chunk.logprobs[0]
        assert entry.token == chunk.token_ids[0] == entry.top[0][0]
        assert entry.logprob == entry.top[0][1] <= 0
        assert len(entry.top) == 3


def test_limits_and_refusals(tiny_model: Model) -> None:
    engine = Engine(tiny_model)
    with pytest.raises(UsageError, match="no tokens"):
        engine.add([], SamplingParams())
    with pytest.raises(UsageError, match="max-model-len"):
        engine.add([1] * tiny_model.max_len, SamplingParams())
    with pytest.raises(UsageError, match="vocabulary"):
        engine.add([9999], SamplingParams())
    with pytest.raises(UsageError, match="stop_token_ids"):
        engine.add([1], SamplingParams(stop_token_ids=(9999,)))
    full = answers(engine, [([1] * (tiny_model.max_len - 3), SamplingParams(ignore_eos=True))])[0]
    assert (len(tokens_of(full)), full[-1].finish_reason) == (3, "length")
    small = Engine(replace(tiny_model, blocks=2))
    with pytest.raises(UsageError, match="the whole cache holds 64"):
        small.add([1] * 100, SamplingParams())
    grown = answers(small, [([1] * 40, SamplingParams(ignore_eos=True, max_tokens=100))])[0]
    assert grown[-1].finish_reason == "length", "a sequence that outgrows the whole cache ends there"
    assert len(tokens_of(grown)) == 64 - 40 + 1
    assert small.pool.available == 2


@pytest.mark.parametrize("ahead", [False, True])
def test_cancel_frees_everything(tiny_model: Model, ahead: bool) -> None:
    engine = Engine(tiny_model, ahead=ahead)
    number = engine.add([1, 2, 3], SamplingParams(n=3, ignore_eos=True))
    engine.step()
    engine.step()
    engine.cancel(number)
    assert engine.busy == ahead, "the step that is under way still has to land"
    assert not any(engine.step() for _ in range(ahead))
    assert not engine.busy
    assert engine.pool.available == engine.pool.size
    assert list(engine.run(number)) == []
