"""How often answers are looked at for drafts: each step where drafts come of it, less often where none do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.engine.drafting import LISTEN_EVERY, PATIENCE, Drafting
from slipstream.engine.flight import Forecast
from slipstream.program import Draft
from slipstream.scheduling import Offer, Plan
from slipstream.speculation import Controller
from tests.speculation.scripted import FREE

STEPS = 200


class Scripted(Controller):
    """Offers a draft of one token in every look, and makes it while `useful`."""

    def __init__(self) -> None:
        super().__init__([])
        self.looks, self.useful = 0, False

    def offers(self, eligible: Any, cost: Any) -> dict[int, Offer]:
        self.looks += 1
        return {id(eligible[0]): Offer((0.9,))}

    def draft(self, plan: Plan) -> dict[int, Draft]:
        return {1: Draft.chain([5], [0], "scripted")} if self.useful else {}


@pytest.fixture
def controller() -> Scripted:
    return Scripted()


@pytest.fixture
def drafting(controller: Scripted) -> Drafting:
    return Drafting(controller, None, None, 100)  # type: ignore[arg-type]


def run(drafting: Drafting, answers: int, steps: int = STEPS, *, ahead: bool = False) -> int:
    """Looks in so many steps of so many answers; planned ahead, those that cannot be foreseen only."""
    controller = drafting.controller
    assert isinstance(controller, Scripted)
    before = controller.looks
    sequences: Any = [
        SimpleNamespace(blocks=[1], unknown=0, missing=1, waits_for=None, constraint=None) for _ in range(answers)
    ]
    flight: Any = SimpleNamespace(drafts={}, drawing=[])
    for _ in range(steps):
        offers, _ = drafting.offers(sequences, FREE, under_way=ahead and drafting.unforeseen(flight))
        if offers:
            drafting.drafts(Plan([], [], [], [], []))
    return controller.looks - before


@pytest.mark.parametrize("answers", [1, 4, 64])
def test_while_drafts_come_of_it_every_step_is_looked_at(
    drafting: Drafting, controller: Scripted, answers: int
) -> None:
    controller.useful = True
    assert run(drafting, answers) == STEPS


@pytest.mark.parametrize(("answers", "every"), [(1, 2), (3, 2), (4, 2), (8, 4), (16, LISTEN_EVERY), (64, LISTEN_EVERY)])
def test_answers_that_bring_nothing_are_looked_at_less_often(drafting: Drafting, answers: int, every: int) -> None:
    assert run(drafting, answers) == PATIENCE + (STEPS - PATIENCE) // every


def test_when_drafts_come_of_it_every_step_is_looked_at_again(drafting: Drafting, controller: Scripted) -> None:
    run(drafting, 16)
    controller.useful = True
    assert run(drafting, 16) > STEPS - LISTEN_EVERY
    controller.useful = False
    assert run(drafting, 16, PATIENCE) == PATIENCE
    assert run(drafting, 16, LISTEN_EVERY) == 1


def test_steps_that_are_planned_ahead_count(drafting: Drafting) -> None:
    """They cannot be looked at, so that those that can are."""
    drafting._quiet = 1  # nothing was offered lately
    looks = run(drafting, 16, ahead=True)
    assert STEPS // LISTEN_EVERY - 1 <= looks <= STEPS // LISTEN_EVERY + PATIENCE


@pytest.mark.parametrize("prompt_rows", [0, 16])
def test_steps_that_prompts_share_say_nothing_of_drafts(
    drafting: Drafting, controller: Scripted, prompt_rows: int
) -> None:
    """What a prompt's rows take is not what verifying took."""
    sequence = SimpleNamespace(tag="x")
    flight: Any = SimpleNamespace(
        drafts={id(sequence): Draft.chain([5, 6], [0, 0], "scripted")}, drawing=[sequence], begun=0.0, tokens=[2],
        forecast=Forecast(plain=1.0, speedup=1.5, extra=0.1), rows=range(1 + 2 + prompt_rows),
    )  # fmt: skip
    drafting.step_landed(flight)
    assert controller.pace.steps == (0 if prompt_rows else 1)
    assert (controller.dearness == 1.0) == bool(prompt_rows)
