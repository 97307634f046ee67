"""What a drafter would have reached on recorded answers is what it reaches when it drafts for them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from slipstream.engine import Engine, LoadOptions, Model, load_model
from slipstream.program import BLOCK_SLOTS, KVFormat, Namespace
from slipstream.program.sampling import SamplingParams
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation import Ask, Drafter, ModelDrafter
from tests.engine.test_jitter import collect
from tests.speculation.scripted import FREE
from tests.speculation.test_state import Eager

SLOW = replace(FREE, pace=1000.0)
POINTS = 0.02
ANSWERS, LENGTH = 40, 200
Texts = list[tuple[list[int], SamplingParams, list[int]]]


def texts_of(model: Model, temperature: float = 0.8, prompts: int = 2) -> Texts:
    """Prompts, settings, and what the target answers; other numbers give other `prompts`."""
    rng, engine, texts = random.Random(prompts), Engine(model), []
    for seed in range(ANSWERS):
        prompt = [rng.randrange(256) for _ in range(20)]
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=LENGTH, ignore_eos=True)
        texts.append((prompt, params, collect(engine.run(engine.add(prompt, params)))[0].tokens))
    return texts


def teacher_forced(drafter: Drafter, texts: Texts) -> float:
    """Acceptance of one draft a verification, from what the drafter says given the true tokens before each place.

    After a draft that holds comes a token that is not drafted: places after easy ones are visited less often.
    """
    right = tried = 0
    for prompt, params, said in texts:
        namespace = Namespace("", "", KVFormat.BF16)
        answer = Answer(0, 0, list(prompt), len(prompt), params, params.seed or 0, frozenset(), 1 << 20, namespace)
        answer.blocks = list(range(-(-(len(prompt) + LENGTH + 1) // BLOCK_SLOTS)))
        agrees = []
        for token in said:
            (draft,) = drafter.propose([Ask(answer, 1, 0.0, lambda draft_class: 1.0)])
            assert draft is not None
            agrees.append(draft.tokens[0] == token)
            answer.append(token)
        drafter.free(answer)
        place = 1  # the first token comes with the prompt
        while place < len(said) - 1:  # and nothing is drafted for the last
            right += agrees[place]
            tried += 1
            place += 2 if agrees[place] else 1
    return right / tried


def test_recorded_and_served_acceptance_agree(tiny_gguf: Path) -> None:
    model = load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1))
    twin = load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1))
    drafter = ModelDrafter(twin.executable, "itself", 64, drawing="likeliest")  # of what is sampled: right now and then
    texts = texts_of(model)
    expected = teacher_forced(drafter, texts)
    assert 0.2 < expected < 0.95
    drafter.prior = lambda draft_class: 0.9  # type: ignore[method-assign]
    drafter.most = 1
    controller = Eager([drafter])
    for prompt, params, said in texts:
        engine = Engine(model, SLOW, controller=controller, ahead=False)  # anew: it would learn how fast it really is
        assert collect(engine.run(engine.add(prompt, params)))[0].tokens == said
    (counts,) = controller.counts().values()
    assert counts.tries[0] > ANSWERS * LENGTH / 4
    assert abs(counts.conditional()[0] - expected) < POINTS
