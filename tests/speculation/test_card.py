"""A drafter's card promises tokens a verification: who is far under it is named, at the card's own length, and soon."""

from __future__ import annotations

import random

import pytest

from slipstream.program import Draft
from slipstream.scheduling import Plan, SpanPlan
from slipstream.speculation import Controller
from slipstream.speculation.card import Card
from tests.speculation.test_controller import COST, Luck, Play, answer_of


def test_a_drafter_that_breaks_its_promise_is_named() -> None:
    for tau, chance in ((3.5, 0.05), (3.5, 0.9)):
        controller = Controller([Luck()], Card(tau=tau))
        play = Play(controller)
        for _ in range(300):
            controller.offers([play.answer], COST)
            if id(play.answer) not in controller._ready:
                play.answer.tokens.append(1)
                continue
            draft = controller.draft(Plan([SpanPlan(play.answer, 1, 4)], [], [], [], []))[id(play.answer)]
            held = 0
            while held < len(draft) and play.random.random() < chance:
                held += 1
            for _ in range(60):
                controller.landed(play.answer, draft, range(held), ended=False)
            play.answer.tokens += [1] * (held + 1)
        said = controller.disappointed()
        assert (said is not None and "3.50" in said) == (chance < 0.5)


@pytest.mark.parametrize(
    ("rounds", "accepted", "named"), [(12, 0, True), (7, 0, False), (12, 2, False), (400, 1, True)]
)
def test_a_drafter_that_is_no_good_is_named_soon(rounds: int, accepted: int, named: bool) -> None:
    """It is seldom asked, so that a few verifications must do; but luck alone must not."""
    controller, answer = Controller([Luck()], Card(tau=3.5)), answer_of()
    controller.offers([answer], COST)
    draft = controller.draft(Plan([SpanPlan(answer, 1, 4)], [], [], [], []))[id(answer)]
    for _ in range(rounds):
        controller.landed(answer, draft, range(accepted), ended=False)
    assert (controller.disappointed() is not None) == named


@pytest.mark.parametrize("most", [1, 2, 8])
@pytest.mark.parametrize(("chance", "named"), [(0.8, False), (0.35, True)])
def test_a_promise_is_compared_at_its_own_length(most: int, chance: float, named: bool) -> None:
    """A card's tau is that of drafts of one length; what is asked of the drafter is often shorter."""
    rng, card = random.Random(0), Card(tau=1 + sum(0.8**k for k in range(1, 6)), draft_len=5)
    controller = Controller([Luck()], card)
    draft = Draft.chain([1] * most, [0] * most, "luck")
    for _ in range(600):
        held = next((n for n in range(most) if rng.random() >= chance), most)
        controller.landed(answer_of(), draft, range(held), ended=False)
    said = controller.disappointed()
    assert (said is not None) == named
    assert said is None or "of 5 drafts" in said
