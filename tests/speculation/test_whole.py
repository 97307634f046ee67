"""The big forms of what other files show on a few cases: drafts always right or wrong, acceptance and S foreseen."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.engine import Engine, load_model
from slipstream.program.sampling import SamplingParams
from slipstream.speculation import Controller, ModelDrafter
from tests.engine.test_jitter import collect
from tests.speculation.families import LONGEST, OPTIONS, SLOW
from tests.speculation.scripted import FREE, Adversarial
from tests.speculation.test_controller import Luck, Text
from tests.speculation.test_identity import answers, requests_of, scripted, self_drafter
from tests.speculation.test_prediction import STEPS, WARM_UP, Machine
from tests.speculation.test_state import Eager
from tests.speculation.test_teacher_forced import POINTS, teacher_forced, texts_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

SETTINGS = [
    SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.7, seed=5, top_p=0.9, frequency_penalty=0.4, repetition_penalty=1.1),
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(SETTINGS)))
def test_tau_of_a_model_that_drafts_for_itself_is_k_and_one(place: int, tiny_gguf: Path) -> None:
    """At every K, greedy, sampled and penalised, over 12 answers of 9 whole drafts each."""
    model = load_model(str(tiny_gguf), OPTIONS)
    drafter = self_drafter(model)
    drafter.prior = lambda draft_class: 0.99  # type: ignore[method-assign]
    for most in range(1, LONGEST + 1):
        drafter.most = most
        for seed in range(12):
            params = replace(SETTINGS[place], seed=seed, max_tokens=1 + 9 * (most + 1), ignore_eos=True)
            engine = Engine(model, SLOW, controller=Eager([drafter]), ahead=False)
            prompt = [seed, 2, 3, 4]
            said = collect(engine.run(engine.add(prompt, params)))
            bare = Engine(model)
            assert said == collect(bare.run(bare.add(prompt, params)))
            drafts = engine.timings[0].drafts
            assert drafts.hits == drafts.tries, (most, seed)
            assert drafts.accepted == drafts.drafted
            if most <= 4:  # longer ones begin with a trial of four
                assert drafts.tau == most + 1, (most, seed)


def test_ten_thousand_tokens_beside_a_drafter_that_is_always_wrong(tiny_gguf: Path) -> None:
    model, tokens, seed = load_model(str(tiny_gguf), OPTIONS), 0, 5000
    while tokens < 10_000:
        rng = random.Random(seed)
        wanted = requests_of(rng, 8)
        plain = answers(Engine(model), wanted)
        controller = Controller([Adversarial(scripted(model, wanted, plain, 0.0, rng.randint(1, LONGEST)))])
        assert answers(Engine(model, FREE, controller=controller), wanted, rng) == plain, seed
        (counts,) = controller.counts().values()
        assert (counts.accepted, counts.tau) == (0, 1.0)
        tokens += sum(len(said.tokens) for answer in plain for said in answer.values())
        seed += 1


@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.2])
def test_recorded_and_served_acceptance_agree_at_every_temperature(temperature: float, tiny_gguf: Path) -> None:
    model = load_model(str(tiny_gguf), OPTIONS)
    twin = load_model(str(tiny_gguf), OPTIONS)
    drafter = ModelDrafter(twin.executable, "itself", 64, drawing="likeliest")
    texts = []
    for seed in range(3):
        texts += texts_of(model, temperature, seed)
    expected = teacher_forced(drafter, texts)
    drafter.prior = lambda draft_class: 0.9  # type: ignore[method-assign]
    drafter.most = 1
    controller = Eager([drafter])
    for prompt, params, said in texts:
        engine = Engine(model, SLOW, controller=controller, ahead=False)
        assert collect(engine.run(engine.add(prompt, params)))[0].tokens == said
    (counts,) = controller.counts().values()
    assert abs(counts.conditional()[0] - expected) < POINTS / 2


@pytest.mark.parametrize("drafter", [Luck, Text])
@pytest.mark.parametrize("most", [1, 2, 4, 8, 16])
def test_what_is_foreseen_comes_on_the_whole_grid(drafter: type[Luck], most: int) -> None:
    """S within 10 % of what was foreseen, and nothing left switched on where it does not pay."""
    for batch in (1, 2, 4, 8, 16):
        for context in (64, 500, 4000):
            for chance in (0.0, 0.2, 0.4, 0.5, 0.7, 0.85, 0.95, 1.0):
                one = drafter()
                one.most = most
                machine = Machine(Controller([one]), batch, context, chance)
                machine.run(WARM_UP)
                machine.run(STEPS)
                cell = (batch, context, chance)
                assert machine.plain / machine.taken >= 0.97, cell
                if machine.pace.steps > STEPS // 4:
                    assert machine.pace.predicted_speedup == pytest.approx(machine.pace.measured_speedup, rel=0.1), cell
