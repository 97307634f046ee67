"""A new drafter beside the present one: no answer changes, and what falls short is taken back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine import Engine, LoadOptions, Model
from slipstream.engine.drafters import Speculative, load_candidate, load_speculative
from slipstream.program import Draft
from slipstream.speculation import Ask, Controller, Drafter, SuffixDrafter
from slipstream.speculation.card import Card
from slipstream.speculation.rollout import Arm, Rollout, Stage
from tests.speculation.folders import eagle3_folder
from tests.speculation.test_identity import answers, requests_of
from tests.speculation.test_state import SLOW

OPTIONS = LoadOptions(max_rows=64, threads=1)


def loaded(target: Path, folder: Path) -> tuple[Model, Controller]:
    wanted = Speculative("folder", str(eagle3_folder(folder)))
    model, controller = load_speculative(str(target), OPTIONS, wanted)
    assert controller is not None
    return model, controller


def oracle(drafter: Drafter, said: dict[tuple[int, ...], list[int]], chance: float, seed: int = 0) -> None:
    """Let a drafter draft what the answers will be, each token right with a chance."""
    rng = random.Random(seed)
    propose = drafter.propose

    def better(asks: Any) -> list[Draft | None]:
        drafts = propose(asks)
        for place, (ask, draft) in enumerate(zip(asks, drafts, strict=True)):
            tokens = list(ask.answer.tokens)
            whole = next((a for p, a in said.items() if tokens[: len(p)] == list(p)), None)
            if draft is None or whole is None:
                continue
            done = len(tokens) - ask.answer.prompt_length
            right = whole[done : done + len(draft)]
            mixed = [t if rng.random() < chance else 0 for t in right] + [0] * (len(draft) - len(right))
            drafts[place] = Draft.chain(mixed, draft.classes, draft.drafter)
        return drafts

    drafter.propose = better  # type: ignore[method-assign]
    drafter.prior = lambda draft_class: 0.9  # type: ignore[method-assign]


@pytest.mark.parametrize("stage", ["shadow", "canary", "all"])
@pytest.mark.parametrize("text_only", [False, True])
def test_no_answer_changes(stage: Stage, text_only: bool, tiny_gguf: Path, tmp_path: Path) -> None:
    """Deployed while answers are under way, with preemption, forks and a warm prefix cache."""
    from slipstream.engine import load_model

    if text_only:
        model, present = load_model(str(tiny_gguf), OPTIONS), Controller([SuffixDrafter()])
    else:
        model, present = loaded(tiny_gguf, tmp_path / "old")
    wanted = requests_of(random.Random(3), 24, 40)
    plain = answers(Engine(model, prefix_cache=False), wanted)
    candidate = load_candidate(eagle3_folder(tmp_path / "new"), model)
    candidate.drafter.prior = lambda draft_class: 0.9  # type: ignore[method-assign]
    engine = Engine(model, SLOW, controller=present, ahead=False)
    numbers = [engine.add(prompt, params) for prompt, params in wanted[:12]]
    said: dict[int, dict[int, list[int]]] = {}

    def hear(chunks: Any) -> None:
        for chunk in chunks:
            said.setdefault(chunk.request, {}).setdefault(chunk.choice, []).extend(chunk.token_ids)

    for _ in range(9):
        hear(engine.step())
    rollout = Rollout(present, candidate.drafter, Card(), stage, 0.5, auto=False, under_way=engine.sequences)
    engine.roll_out(rollout, candidate.model)
    numbers += [engine.add(prompt, params) for prompt, params in wanted[12:]]
    while engine.busy:
        hear(engine.step())
    engine.check()
    engine.step()
    assert not rollout._ours
    assert not rollout._seen
    assert not rollout._shadow._seen
    for number, expected in zip(numbers, plain, strict=True):
        assert said[number] == {choice: one.tokens for choice, one in expected.items()}
    if stage == "all":
        assert any(name == "eagle3" for name, _ in rollout.candidate.counts())
        assert rollout.arms["candidate"].rounds > 0
    if stage == "shadow":
        assert not rollout.candidate.counts()
        assert rollout.arms["candidate"].rounds > 0


def prompts(count: int) -> list[list[int]]:
    return [[number % 250, number // 250, 7, 9, 11] for number in range(count)]


def served(model: Model, rollout: Rollout, count: int, said: dict[tuple[int, ...], list[int]]) -> None:
    """Engines are made anew again and again: they would learn how fast this model really is, and stop drafting."""
    from slipstream.program.sampling import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for place, prompt in enumerate(prompts(count)):
        if place % 4 == 0:
            engine = Engine(model, SLOW, prefix_cache=False, ahead=False)
            engine.roll_out(rollout, model)
        number = engine.add(prompt, params)
        tokens = [token for chunk in engine.run(number) for token in chunk.token_ids]
        assert tokens == said[tuple(prompt)]


@pytest.mark.parametrize(("old", "new", "ends"), [(0.5, 0.9, "all"), (0.9, 0.4, "back")])
def test_what_is_better_goes_on_and_what_is_worse_goes_back(
    old: float, new: float, ends: str, tiny_gguf: Path, tmp_path: Path
) -> None:
    from slipstream.program.sampling import SamplingParams

    model, present = loaded(tiny_gguf, tmp_path / "old")
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    bare, said = Engine(model, ahead=False), {}
    for prompt in prompts(140):
        number = bare.add(prompt, params)
        said[tuple(prompt)] = [token for chunk in bare.run(number) for token in chunk.token_ids]
    present = Controller([present.neural] if present.neural is not None else [])
    candidate = load_candidate(eagle3_folder(tmp_path / "new"), model)
    assert present.neural is not None
    oracle(present.neural, said, old)
    oracle(candidate.drafter, said, new, 1)
    rollout = Rollout(present, candidate.drafter, Card(), "shadow", 0.5, auto=True)
    for _ in range(10):
        served(candidate.model, rollout, 140, said)
        if rollout.outcome is not None or rollout.stage == "all":
            break
    if ends == "all":
        assert rollout.outcome is None
        assert rollout.stage == "all"
    else:
        assert rollout.outcome is not None
        assert "tau" in rollout.outcome
        before = sum(c.rounds for c in rollout.candidate.counts().values())
        served(candidate.model, rollout, 20, said)
        assert sum(c.rounds for c in rollout.candidate.counts().values()) == before


def test_the_lower_bound_holds() -> None:
    """Of many made-up drafters, about one in twenty has a tau below its lower bound."""
    rng = random.Random(0)
    misses = 0
    for _ in range(400):
        arm = Arm("x")
        for _ in range(60):
            easy = rng.choice([0.3, 0.7])  # answers differ from one another more than chance alone makes them
            accepted = [sum(1 for _ in iter(lambda e=easy: rng.random() < e, False)) for _ in range(20)]
            arm.add(len(accepted), sum(accepted))
        misses += arm.lower > 1 + (0.3 / 0.7 + 0.7 / 0.3) / 2
    assert 4 <= misses <= 40


def test_an_ask_needs_a_drafter(tiny_gguf: Path, tmp_path: Path) -> None:
    """An answer of the text-only present has no neural drafter, and is never asked of one."""
    from slipstream.engine import load_model

    model = load_model(str(tiny_gguf), OPTIONS)
    candidate = load_candidate(eagle3_folder(tmp_path / "new"), model)
    rollout = Rollout(Controller([SuffixDrafter()]), candidate.drafter, Card(), "shadow", 0.5, auto=False)
    both = rollout.neural
    assert both is not None
    engine = Engine(model, SLOW, controller=rollout.present, ahead=False)
    from slipstream.program.sampling import SamplingParams

    engine.add([1, 2, 3], SamplingParams(max_tokens=4))
    (answer,) = engine.sequences
    assert both.propose([Ask(answer, 2, 0.0, lambda c: 1.0)]) == [None]
    assert both.state_for(answer) == ""
    assert not both.ready(answer)
