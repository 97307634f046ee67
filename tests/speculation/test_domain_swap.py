"""Traffic changes its subject: the real engine with real drafters leaves off within 64 tokens, and takes up again.

Drafters hold as often as the subject has it. What a step and a pass take is said, not measured, and seconds are counted
by that, so that nothing depends on a clock.
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
from tests.speculation.families import OPTIONS, family_of
from tests.speculation.lucky import rightly

# 10 ms a step, 0.7 ms for each row more; a pass of the drafter takes 1 ms.
COST = CostModel(Curve((1, 64), (9e-3, 53e-3)), Curve((1, 64), (1e-3, 1.001e-3)), (0, 0, 0, 0), drafted=0.0)
PASS = 1e-3
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

    def __init__(self, family: str, target: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
        model, drafter = family_of(family, target, folder, 4)
        self.chance, self._random, made = 0.0, random.Random(2), list[int]()
        self._known = self._truths(load_model(str(target), OPTIONS))
        propose = drafter.propose

        def better(asks: Sequence[Ask]) -> list[Draft | None]:
            drafts = propose(asks)
            for place, (ask, draft) in enumerate(zip(asks, drafts, strict=True)):
                if draft is not None:
                    made.append(drafter.passes or len(draft))
                    truth = self._known[tuple(ask.answer.tokens[:3])][ask.answer.generated :]
                    drafts[place] = rightly(draft, truth, self._random, self.chance)
            return drafts

        monkeypatch.setattr(drafter, "propose", better)
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


def speedup(seconds: Sequence[float]) -> float:
    return step_seconds(1) * len(seconds) / sum(seconds)


@pytest.mark.parametrize("family", ["draft", "eagle3", "dspark"])
def test_back_within_64_tokens(family: str, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(family, tiny_gguf, tmp_path, monkeypatch)
    play.answer(PROMPTS[0], [(0, 0.92)])
    assert speedup(play.answer(PROMPTS[1], [(0, 0.92)])) > 1.5
    swapped = play.answer(PROMPTS[2], [(0, 0.92), (SWAP, 0.0)])
    assert speedup(swapped[:SWAP]) > 1.5
    assert speedup(swapped[SWAP + GRACE :]) >= 0.97
    for prompt in PROMPTS[3:6]:  # and whoever comes after
        assert speedup(play.answer(prompt, [(0, 0.0)])) >= 0.97
    for prompt in PROMPTS[6:8]:
        play.answer(prompt, [(0, 0.92)])
    assert speedup(play.answer(PROMPTS[8], [(0, 0.92)])) > 1.5, "and finds out that drafts pay again"


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
