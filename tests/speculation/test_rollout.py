"""A new drafter beside the present one: no answer changes, and what falls short is taken back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine import Engine, LoadOptions, Model
from slipstream.engine.drafters import Speculative, load_candidate, load_speculative
from slipstream.program import Draft, KVFormat, Namespace
from slipstream.program.sampling import SamplingParams
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation import Ask, Controller, Drafter, SuffixDrafter
from slipstream.speculation.card import Card
from slipstream.speculation.rollout import ENOUGH_ROUNDS, LEAST_TAU, REMEMBERED, Arm, Rollout, Stage
from slipstream.speculation.shadow import DRAFT
from slipstream.speculation.statistics import Counts
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
@pytest.mark.features(
    "rollout", "neural drafts", "text drafts", "n", "sampling", "penalties", "logprobs", "prefix cache"
)
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
    assert present.counts()["suffix", ""].drafted > 0
    if stage == "all":
        assert rollout.candidate.seen.rounds > 0
        assert rollout.arms["candidate"].rounds > 0
    if stage == "canary":
        assert {len(rollout.arms[name].answers) > 0 for name in rollout.arms} == {True} or text_only
        assert rollout.arms["candidate"].rounds > 0
    if stage == "shadow":
        assert not rollout.candidate.seen.rounds
        assert rollout.arms["candidate"].rounds > 0


def answers_of(count: int, first: int = 0) -> list[Answer]:
    params, namespace = SamplingParams(temperature=0.0), Namespace("", "", KVFormat.BF16)
    return [Answer(first + n, 0, [1], 1, params, 0, frozenset(), 1 << 30, namespace, blocks=[0]) for n in range(count)]


def prompts(count: int) -> list[list[int]]:
    return [[number % 250, number // 250, 7, 9, 11] for number in range(count)]


def served(model: Model, rollout: Rollout, count: int, said: dict[tuple[int, ...], list[int]]) -> None:
    """Engines are made anew again and again: they would learn how fast this model really is, and stop drafting."""
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
        before = rollout.candidate.seen.rounds
        served(candidate.model, rollout, 20, said)
        assert rollout.candidate.seen.rounds == before


def test_the_lower_bound_holds() -> None:
    """Of many made-up drafters, about one in twenty has a tau below its lower bound."""
    rng = random.Random(0)
    misses = 0
    for _ in range(400):
        arm = Arm("x")
        for _ in range(60):
            easy = rng.choice([0.3, 0.7])  # answers differ from one another more than chance alone makes them
            accepted = [sum(1 for _ in iter(lambda e=easy: rng.random() < e, False)) for _ in range(20)]
            counts = Counts()
            for count in accepted:
                counts.add(DRAFT, min(count, DRAFT), min(count + 1, DRAFT))
            arm.add(counts.tries, counts.hits)
        misses += arm.lower > 1 + sum(0.3**k + 0.7**k for k in range(1, DRAFT + 1)) / 2
    assert 4 <= misses <= 40


def test_drafts_of_any_length_are_compared() -> None:
    """The planner asks the surer drafter for more: that alone makes nobody better."""
    rng, arms = random.Random(1), {}
    for most in (2, 4, 8):
        arms[most] = Arm(str(most))
        for _ in range(300):
            counts = Counts()
            for _ in range(10):
                accepted = next((n for n in range(most) if rng.random() > 0.7), most)
                counts.add(most, accepted, min(accepted + 1, most))
            arms[most].add(counts.tries, counts.hits)
    taus = [arm.tau for arm in arms.values()]
    assert max(taus) - min(taus) < 0.15
    assert abs(taus[0] - (1 + sum(0.7**k for k in range(1, DRAFT + 1)))) < 0.15


@pytest.mark.parametrize("stage", ["shadow", "canary", "all"])
def test_a_beginning_that_is_cached_keeps_no_candidate_away(stage: Stage, tiny_gguf: Path, tmp_path: Path) -> None:
    """Chats begin alike, and what was computed of that before the candidate came lacks its state."""
    model, present = loaded(tiny_gguf, tmp_path / "old")
    candidate = load_candidate(eagle3_folder(tmp_path / "new"), model)
    rollout = Rollout(present, candidate.drafter, Card(), stage, 1.0, auto=False)
    engine = Engine(candidate.model, SLOW, controller=present, ahead=False)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [[*(7 + n % 90 for n in range(100)), n, n + 1, n + 2] for n in range(8)]

    def said() -> list[list[int]]:
        return [[t for c in engine.run(engine.add(prompt, params)) for t in c.token_ids] for prompt in prompts]

    before, asked, ready = said(), dict[int, bool](), candidate.drafter.ready

    def noted(answer: Answer) -> bool:
        return asked.setdefault(answer.request, ready(answer))

    candidate.drafter.ready = noted  # type: ignore[method-assign]
    engine.roll_out(rollout, candidate.model)
    assert said() == before
    assert said() == before
    engine.check()
    assert asked == dict.fromkeys(range(8, 24), True)
    if stage != "shadow":
        assert engine.timings[23].cached_tokens >= 64, "and share what they begin with among themselves"


@pytest.mark.parametrize(("chance", "ends"), [(0.0, True), (0.9, False)])
def test_what_brings_nothing_is_taken_back_where_text_alone_drafts(
    chance: float, ends: bool, tiny_gguf: Path, tmp_path: Path
) -> None:
    from slipstream.engine import load_model

    model = load_model(str(tiny_gguf), OPTIONS)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    bare, said = Engine(model, ahead=False), {}
    for prompt in prompts(140):
        said[tuple(prompt)] = [token for chunk in bare.run(bare.add(prompt, params)) for token in chunk.token_ids]
    candidate = load_candidate(eagle3_folder(tmp_path / "new"), model)
    oracle(candidate.drafter, said, chance)
    rollout = Rollout(Controller([]), candidate.drafter, Card(), "shadow", 1.0, auto=False)
    served(candidate.model, rollout, 60, said)
    assert rollout.arms["candidate"].enough
    assert (rollout.outcome is not None) is ends


def test_straight_to_all_it_is_judged_by_what_was_before(tiny_gguf: Path, tmp_path: Path) -> None:
    """The present drafter drafts no more, but what it brought is known."""
    model, present = loaded(tiny_gguf, tmp_path / "old")
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    bare, said = Engine(model, ahead=False), {}
    for prompt in prompts(100):
        said[tuple(prompt)] = [token for chunk in bare.run(bare.add(prompt, params)) for token in chunk.token_ids]
    present = Controller([present.neural] if present.neural is not None else [])
    candidate = load_candidate(eagle3_folder(tmp_path / "new"), model)
    assert present.neural is not None
    oracle(present.neural, said, 0.9)
    oracle(candidate.drafter, said, 0.5, 1)
    for place, prompt in enumerate(prompts(100)):
        if place % 4 == 0:
            engine = Engine(model, SLOW, controller=present, prefix_cache=False, ahead=False)
        list(engine.run(engine.add(prompt, params)))
    rollout = Rollout(present, candidate.drafter, Card(), "all", 1.0, auto=False)
    assert rollout._before is not None
    served(candidate.model, rollout, 100, said)
    assert rollout.arms["candidate"].tau > LEAST_TAU, "good enough, if there had been none"
    assert rollout.outcome is not None
    assert "the old one's is" in rollout.outcome


def test_who_drafts_for_all_is_judged_by_its_first_answers_there(tiny_gguf: Path, tmp_path: Path) -> None:
    """What the old one brought is of then: traffic that has become harder since is nobody's fault."""
    model, present = loaded(tiny_gguf, tmp_path / "old")
    candidate = load_candidate(eagle3_folder(tmp_path / "new"), model)
    for easy_first in (True, False):
        for _ in range(ENOUGH_ROUNDS):
            present.seen.add(DRAFT, 2, 3)
        rollout = Rollout(present, candidate.drafter, Card(), "all", 1.0, auto=False)
        for place in range(2 * REMEMBERED):
            (answer,) = answers_of(1, place)
            rollout.offers([answer], SLOW)
            neural = rollout.owner(answer).neural
            assert neural is not None
            held = 3 if easy_first and place <= REMEMBERED else 0
            for _ in range(20):
                rollout.landed(answer, Draft.chain([1] * 4, [0] * 4, neural.name), range(held), ended=False)
            rollout.free(answer)
        assert (rollout.outcome is None) is easy_first


def test_an_unproven_candidate_makes_room_for_the_next(tiny_gguf: Path, tmp_path: Path) -> None:
    """Deployed while another one looks on or drafts for some, the new one is beside the proven drafter.

    Whoever comes and goes, what was counted stays counted.
    """
    from slipstream.engine.deployment import Deployment
    from slipstream.engine.messages import Deploy

    model, present = loaded(tiny_gguf, tmp_path / "old")
    wanted = requests_of(random.Random(3), 24, 40)
    plain = answers(Engine(model, prefix_cache=False), wanted)
    engine = Engine(model, SLOW, controller=present, ahead=False)
    deployment = Deployment(engine, "coupled")
    said: dict[int, dict[int, list[int]]] = {}
    counted: dict[tuple[str, str], tuple[int, ...]] = {}

    def steps(count: int) -> None:
        for _ in range(count):
            for chunk in engine.step():
                said.setdefault(chunk.request, {}).setdefault(chunk.choice, []).extend(chunk.token_ids)
            assert engine.controller is not None
            ledger = engine.controller.ledger
            for key, c in ledger.counts().items():
                now = (c.rounds, c.drafted, c.accepted, *c.tries, *c.hits, ledger.pace_of(*key).steps)
                assert all(new >= old for new, old in zip(now, counted.get(key, ()), strict=False))
                counted[key] = now
            assert counted.keys() == ledger.counts().keys()

    def roll(number: int, stage: str) -> Rollout:
        folder = str(eagle3_folder(tmp_path / f"new-{number}"))
        assert deployment.begin(Deploy(number, folder, stage, 0.5, False)) is None
        while (done := deployment.settle()) is None:
            steps(1)
        assert not done.problem
        assert deployment.rollout is not None
        return deployment.rollout

    for place, (stage, proven) in enumerate((("shadow", True), ("canary", True), ("all", True), ("all", False))):
        before = deployment.rollout
        for prompt, params in wanted[place * 6 : place * 6 + 6]:
            engine.add(prompt, params)
        steps(5)
        rollout = roll(place, stage)
        assert rollout.present is (present if proven else before.candidate if before is not None else None)
        steps(4)
    while engine.busy:
        steps(1)
    engine.check()
    assert sum(steps for *_, steps in counted.values()) > 20
    for number, expected in enumerate(plain):
        assert said[number] == {choice: one.tokens for choice, one in expected.items()}


def test_an_ask_needs_a_drafter(tiny_gguf: Path, tmp_path: Path) -> None:
    """An answer of the text-only present has no neural drafter, and is never asked of one."""
    from slipstream.engine import load_model

    model = load_model(str(tiny_gguf), OPTIONS)
    candidate = load_candidate(eagle3_folder(tmp_path / "new"), model)
    rollout = Rollout(Controller([SuffixDrafter()]), candidate.drafter, Card(), "shadow", 0.5, auto=False)
    both = rollout.neural
    assert both is not None
    engine = Engine(model, SLOW, controller=rollout.present, ahead=False)
    engine.add([1, 2, 3], SamplingParams(max_tokens=4))
    (answer,) = engine.sequences
    assert both.propose([Ask(answer, 2, 0.0, lambda c: 1.0)]) == [None]
    assert both.state_for(answer) == ""
    assert not both.ready(answer)
