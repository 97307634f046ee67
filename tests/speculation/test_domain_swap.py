"""Traffic changes its subject: the real engine with real drafters leaves off within 64 tokens, and takes up again.

Neural drafters run as they are; of text, whatever was said, something seems to repeat. Drafts hold as often as the
subject has it. What a step and a pass take is said, not measured, and seconds are counted by that, so that nothing
depends on a clock.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream.engine import Engine, Model, load_model
from slipstream.engine.accounts import StepAccounts
from slipstream.program import Draft, StepShape
from slipstream.program.sampling import SamplingParams
from slipstream.roofline.cost import CostModel, Curve
from slipstream.scheduling import Plan
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation import Ask, Controller, Drafter
from tests.speculation.families import FAMILIES, OPTIONS, family_of
from tests.speculation.lucky import rightly

# 10 ms a step, 0.7 ms for each row more.
COST = CostModel(Curve((1, 64), (9e-3, 53e-3)), Curve((1, 64), (1e-3, 1.001e-3)), (0, 0, 0, 0), drafted=0.0)
PASS, PAYS, TREE_PAYS = 1e-3, 1.5, 1.2
"""A pass of the drafter, and what drafting brings at least where drafts hold; a tree of four tokens is not deep."""
LENGTH, SWAP, GRACE = 400, 150, 64
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=LENGTH, ignore_eos=True)
PROMPTS = [[place + 1, 20, 30] for place in range(9)]


def step_seconds(rows: int) -> float:
    return COST.seconds(StepShape(rows, rows, 0, 0))


class Counted(Controller):
    """Notes what a step verifies, and the passes that its drafts took; machines have no moods."""

    def __init__(self, drafter: Drafter, made: list[int]):
        super().__init__([drafter])
        self.rows = self.passes = 0
        self._made = made

    def draft(self, plan: Plan) -> dict[int, Draft]:
        before = len(self._made)
        drafts = super().draft(plan)
        self.rows = sum(map(len, drafts.values()))
        self.passes = sum(self._made[before:])
        return drafts

    def verified(self, extra: float, expected: float) -> None:
        pass


class Play:
    """Answers one after the other, the drafter right with a chance that changes when the subject does."""

    def __init__(self, family: str, target: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int = 2):
        model, drafter = family_of(family, target, folder, 4)
        self.family = family
        self.chance, self._random, made = 0.0, random.Random(seed), list[int]()
        self._known = self._truths(load_model(str(target), OPTIONS))
        propose = drafter.propose

        def better(asks: Sequence[Ask]) -> list[Draft | None]:
            drafts = propose(asks) if drafter.neural else [seeming(ask.most, drafter.name) for ask in asks]
            for place, (ask, draft) in enumerate(zip(asks, drafts, strict=True)):
                if draft is not None:
                    made.append(drafter.passes or len(draft) if drafter.neural else 0)
                    truth = self._known[tuple(ask.answer.tokens[:3])][ask.answer.generated :]
                    drafts[place] = rightly(draft, truth, self._random, self.chance)
            return drafts

        monkeypatch.setattr(drafter, "propose", better)
        if not drafter.neural:
            monkeypatch.setattr(drafter, "draft", lambda answer, most: better([Ask(answer, most, 0.0, sure)])[0])
        monkeypatch.setattr(drafter, "pass_seconds", lambda answers: PASS)
        for free in ("begin_seconds", "setup_seconds"):
            monkeypatch.setattr(drafter, free, lambda answers: 0.0)
        monkeypatch.setattr(StepAccounts, "snapshot", property(lambda accounts: COST))
        self.controller = Counted(drafter, made)
        self.engine = Engine(model, COST, controller=self.controller, ahead=False)

    def _truths(self, model: Model) -> dict[tuple[int, ...], list[int]]:
        bare, truths = Engine(model), {}
        for prompt in PROMPTS:
            number = bare.add(prompt, PARAMS)
            truths[tuple(prompt)] = [token for chunk in bare.run(number) for token in chunk.token_ids]
        return truths

    def answer(self, prompt: list[int], chances: Sequence[tuple[int, float]]) -> list[float]:
        """Seconds of each token; from so many tokens on, drafts hold with such a chance."""
        self.engine.add(prompt, PARAMS)
        seconds: list[float] = []
        said: list[int] = []
        while self.engine.busy:
            self.chance = next(chance for begins, chance in reversed(chances) if begins <= len(said))
            self.controller.rows = self.controller.passes = 0
            new = [token for chunk in self.engine.step() for token in chunk.token_ids]
            took = step_seconds(1 + self.controller.rows) + self.controller.passes * PASS
            if said:  # the first one comes with the prompt
                seconds += [took / len(new)] * len(new)
            said += new
        assert said == self._known[tuple(prompt)]
        return seconds


def sure(draft_class: int) -> float:
    return 1.0


def seeming(most: int, name: str) -> Draft | None:
    """What text that seems to repeat itself would have."""
    return Draft.chain([0] * min(most, 4), [0] * min(most, 4), name) if most > 0 else None


def speedup(seconds: Sequence[float]) -> float:
    return step_seconds(1) * len(seconds) / sum(seconds)


def there_and_back(play: Play, swap: int) -> None:
    """A drafter that pays; in the middle of an answer it does not any more; later it does again."""
    pays = TREE_PAYS if play.family == "eagle3-tree" else PAYS
    play.answer(PROMPTS[0], [(0, 0.92)])
    assert speedup(play.answer(PROMPTS[1], [(0, 0.92)])) > pays
    swapped = play.answer(PROMPTS[2], [(0, 0.92), (swap, 0.0)])
    assert speedup(swapped[:swap]) > 0.9 * pays
    assert speedup(swapped[swap + GRACE :]) >= 0.97
    for prompt in PROMPTS[3:6]:  # and whoever comes after
        assert speedup(play.answer(prompt, [(0, 0.0)])) >= 0.97
    for prompt in PROMPTS[6:8]:
        play.answer(prompt, [(0, 0.92)])
    assert speedup(play.answer(PROMPTS[8], [(0, 0.92)])) > pays, "and finds out that drafts pay again"


@pytest.mark.parametrize("family", FAMILIES)
def test_back_within_64_tokens(family: str, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there_and_back(Play(family, tiny_gguf, tmp_path, monkeypatch), SWAP)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_back_wherever_the_subject_changes(
    family: str, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(12):
        there_and_back(Play(family, tiny_gguf, tmp_path, monkeypatch, seed), (60, 100, 150, 200, 250, 300)[seed % 6])


def test_who_learns_nothing_is_found(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that takes all drafts to have held goes on drafting."""
    landed = Controller.landed

    def blind(self: Controller, answer: Answer, draft: Draft, held: Sequence[int], *, ended: bool) -> int:
        return landed(self, answer, draft, range(len(draft)), ended=ended)

    monkeypatch.setattr(Controller, "landed", blind)
    play = Play("eagle3", tiny_gguf, tmp_path, monkeypatch)
    play.answer(PROMPTS[0], [(0, 0.92)])
    swapped = play.answer(PROMPTS[2], [(0, 0.92), (SWAP, 0.0)])
    assert speedup(swapped[SWAP + GRACE :]) < 0.97
