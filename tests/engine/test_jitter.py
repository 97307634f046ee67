"""Random arrivals, cancellations and tiny pools: seeded answers keep their bits, and no block is lost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from slipstream.engine import Engine, Model
from slipstream.program.sampling import SamplingParams


def params_of(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        seed=rng.randrange(1 << 32),
        max_tokens=rng.randint(1, 24),
        temperature=rng.choice([0.0, 0.7, 1.2]),
        top_p=rng.choice([1.0, 0.9]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        logprobs=1,
        ignore_eos=True,
    )


def scenario(model: Model, seed: int) -> None:
    """A few requests arrive at random steps in a pool that holds about two of them; some are cancelled."""
    rng = random.Random(seed)
    requests = [([rng.randrange(256) for _ in range(rng.randint(1, 90))], params_of(rng)) for _ in range(4)]
    expected = []
    for prompt, params in requests:
        engine = Engine(model)
        expected.append([(c.token_ids, c.logprobs, c.text) for c in engine.run(engine.add(prompt, params))])
    engine = Engine(replace(model, blocks=rng.randint(5, 9), max_rows=rng.choice([5, 17, 64])))
    waiting, running, cancelled = list(range(4)), {}, set()
    got: dict[int, list[object]] = {}
    while waiting or engine.busy:
        if waiting and (not engine.busy or rng.random() < 0.3):
            index = waiting.pop(0)
            running[engine.add(*requests[index])] = index
        if running and rng.random() < 0.02:
            number = rng.choice(list(running))
            cancelled.add(running[number])
            engine.cancel(number)
        for chunk in engine.step() if engine.busy else []:
            got.setdefault(running[chunk.request], []).append((chunk.token_ids, chunk.logprobs, chunk.text))
        engine.check()
    assert engine.pool.free == engine.pool.size
    for index, wanted in enumerate(expected):
        seen = got.get(index, [])
        assert seen == (wanted[: len(seen)] if index in cancelled else wanted), f"seed {seed}, request {index}"


def test_jitter(tiny_model: Model) -> None:
    for seed in range(40):
        scenario(tiny_model, seed)


@pytest.mark.long
def test_jitter_long(tiny_model: Model) -> None:
    for seed in range(1000, 3000):
        scenario(tiny_model, seed)
