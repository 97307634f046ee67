"""How likely drafts are taken to be: steady until an answer surprises, and low once they fail again and again."""

from __future__ import annotations

import random
import statistics

import pytest

from slipstream.speculation.acceptance import AnswerAcceptance, PositionAcceptance


def test_an_answer_is_steady_until_it_surprises() -> None:
    """One answer's few observations hardly move what is expected of it; a change of subject does, at once."""
    rng = random.Random(0)
    estimates = []
    for _ in range(200):
        one = AnswerAcceptance(1, lambda draft_class: 0.7)
        for _ in range(30):
            one.observe(0, float(rng.random() < 0.7))
            estimates.append(one.chance(0))
    spread = statistics.pstdev(estimates)
    assert abs(statistics.fmean(estimates) - 0.7) < 0.02
    assert spread < 0.08, "not misled by luck"
    changed = AnswerAcceptance(1, lambda draft_class: 0.7)
    for count in range(1, 20):  # noqa: B007
        changed.observe(0, 0.0)
        if changed.chance(0) < 0.2:
            break
    assert count <= 8
    for count in range(1, 20):  # noqa: B007
        changed.observe(0, 1.0)
        if changed.chance(0) > 0.6:
            break
    assert count <= 14


def test_after_a_few_dozen_drafts_in_vain_little_is_expected() -> None:
    """However sure one could be before: what tag and drafter promise fades slowly, and every draft costs a row."""
    one = AnswerAcceptance(2, lambda draft_class: 0.95)
    for _ in range(200):
        one.observe(0, 1.0)
    for _ in range(30):
        one.observe(0, 0.0)
        one.observe(0, 0.5)
    assert one.chance(0) < 0.04, "what was not verified is no answer"
    assert one.chances([0, 1])[1] > 0.5, "another class had no misses"
    one.observe(0, 1.0)
    assert one.chance(0) > 0.1
    rng, low = random.Random(0), []
    for _ in range(300):  # drafts that hold one time in four are not taken for ones that never do
        seldom = AnswerAcceptance(1, lambda draft_class: 0.25)
        for _ in range(60):
            seldom.observe(0, float(rng.random() < 0.25))
        low.append(seldom.chance(0) < 0.07)
    assert statistics.fmean(low) < 0.04


def test_positions_that_were_hardly_tried_are_like_the_ones_before() -> None:
    positions = PositionAcceptance(8, 0.6, 200.0, 5.0)
    assert [positions.chance(p) for p in (7, 0)] == [0.6, 0.6]
    for _ in range(100):
        positions.observe(0, 0.0)
    assert max(positions.chance(p) for p in range(8)) < 0.05
    for _ in range(100):
        positions.observe(2, 1.0)
    assert positions.chance(1) < 0.05
    assert positions.chance(2) > 0.9
    assert positions.chance(3) == pytest.approx(positions.chance(2))
