"""Which drafts a step verifies: never more than pay, by expectation, and nobody pays for another's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kvcache import BlockPool
from slipstream.program import StepShape
from slipstream.roofline.cost import CostModel, Curve
from slipstream.scheduling import Limits, Offer, Prices, State, allot, schedule
from slipstream.scheduling.drafts import SLACK, _best
from tests.scheduling.test_scheduler import running, sequence

CHEAP = CostModel(Curve((1, 512), (10e-3, 10.5e-3)), Curve((1, 64), (1e-3, 1.05e-3)), (0, 0, 0, 0), drafted=0.0)
DEAR = CostModel(Curve((1, 512), (10e-3, 5.12)), Curve((1, 64), (1e-3, 64e-3)), (0, 0, 0, 0), drafted=0.0)


def rate(decodes: int, survivals: list[float], seconds: float) -> float:
    return (decodes + sum(survivals)) / seconds


@given(
    st.lists(st.floats(0.01, 1.0), max_size=10),
    st.floats(0.0, 0.5),
    st.integers(0, 12),
)
def test_one_answer_gets_the_best_length(chances: list[float], row: float, room: int) -> None:
    survival = tuple(itertools.accumulate(chances, lambda a, b: a * b))
    chosen = allot([Offer(survival)], Prices(lambda rows: 1.0 + row * rows), 1, room)
    lengths = range(min(len(survival), room) + 1)
    best = max(rate(1, list(survival[:k]), 1.0 + row * k) for k in lengths)
    found = rate(1, list(survival[: chosen.drafts[0]]), 1.0 + row * chosen.drafts[0])
    assert found >= 0.9 * best
    assert found >= 1.0 - 1e-9
    assert chosen.rate == pytest.approx(found)
    assert chosen.speedup == pytest.approx(found)


@given(
    st.lists(st.lists(st.floats(0.01, 1.0), max_size=6), min_size=2, max_size=6),
    st.floats(0.0, 0.3),
    st.integers(0, 3),
)
def test_nobody_pays_for_anothers_drafts(answers: list[list[float]], row: float, others: int) -> None:
    offers = [Offer(tuple(itertools.accumulate(chances, lambda a, b: a * b))) for chances in answers]
    decodes = len(offers) + others
    chosen = allot(offers, Prices(lambda rows: 1.0 + row * rows), decodes, 100)
    gains = [sum(o.survival[:n]) for o, n in zip(offers, chosen.drafts, strict=True)] + [0.0] * others
    assert 1.0 + row * sum(chosen.drafts) <= 1.0 + max(SLACK, min(gains)) + 1e-9


def test_passes_of_a_drafter_cost() -> None:
    offer = Offer((0.9, 0.81, 0.73, 0.66), neural=True)
    chain = [allot([offer], Prices(lambda rows: 1.0, 0.0, c), 1, 9).drafts[0] for c in (0.0, 0.3, 0.7, 1.0)]
    assert chain == sorted(chain, reverse=True)
    assert (chain[0], chain[-1]) == (4, 0)
    block = Offer(offer.survival, neural=True, passes=1)
    assert allot([block], Prices(lambda rows: 1.0, 0.0, 0.7), 1, 9).drafts == (4,), "one pass whatever the length"
    late = Offer(offer.survival, neural=True, setup=5.0)
    assert allot([late], Prices(lambda rows: 1.0), 1, 9).drafts == (0,)


def planned(cost: CostModel, prompts: int = 0, **more: object) -> tuple[dict[int, int], dict[int, int]]:
    """(rows, drafts) of two decodes, one of which has a good draft, and some prompts."""
    pool = BlockPool(200)
    decodes = [running(1, 40, pool), running(2, 40, pool)]
    waiting = [sequence(10 + i, 200) for i in range(prompts)]
    offers = {id(s): Offer((0.95, 0.9, 0.86)) for s in decodes}
    state = State(0.0, [*decodes, *waiting], pool, Limits(512), cost=cost, offers=offers, **more)  # type: ignore[arg-type]
    plan = schedule(state)
    return {s.request: rows for s, rows, _ in plan.spans}, {s.request: drafts for s, _, drafts in plan.spans}


def test_the_planner_takes_drafts_where_rows_are_cheap() -> None:
    assert planned(CHEAP)[1] == {1: 3, 2: 3}
    assert planned(DEAR)[1] == {1: 0, 2: 0}
    assert planned(CHEAP, dearness=1e5)[1] == {1: 0, 2: 0}, "verifying lately cost much more than it should"


def test_drafts_compete_with_prompts() -> None:
    """Past the knee a row costs what it costs: where prompts have filled the step, drafts do not pay any more."""
    knee = CostModel(Curve((1, 8, 512), (10e-3, 10e-3, 3.0)), Curve((1, 64), (1e-3, 1.01e-3)), (0, 0, 0, 0), drafted=0)
    assert planned(knee)[1] == {1: 3, 2: 3}
    rows, drafts = planned(knee, prompts=2)
    assert sum(rows.values()) > 8
    assert sum(drafts.values()) == 0


def test_no_drafts_past_the_end_or_without_blocks() -> None:
    pool = BlockPool(3)
    short, cramped = running(1, 40, pool, limit=42), running(2, 32, pool)
    offers = {id(s): Offer((0.9,) * 8) for s in (short, cramped)}
    plan = schedule(State(0.0, [short, cramped], pool, Limits(512), cost=CHEAP, offers=offers))
    assert {s.request: drafts for s, _, drafts in plan.spans} == {1: 1, 2: 0}
    assert plan.preempted == []
    full = schedule(State(0.0, [short], pool, Limits(2), cost=CHEAP, offers=offers))
    assert [span.drafts for span in full.spans] == [1], "a step's rows are limited"


def test_a_plan_says_what_it_expects() -> None:
    pool = BlockPool(10)
    one = running(1, 40, pool)
    offers = {id(one): Offer((0.5, 0.25), neural=True)}
    plan = schedule(State(0.0, [one], pool, Limits(512), cost=CHEAP, offers=offers, draft_pass=1e-3))
    assert plan.spans[0].drafts == 2
    assert plan.plain == pytest.approx(CHEAP.seconds(StepShape(1, 1, 0, 40)), rel=1e-3)
    assert plan.speedup == pytest.approx(1.75 * 11 / 13, rel=0.01)
    assert 0.0 < plan.row_price < plan.draft_price < 0.25


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=16), st.floats(0.0, 0.6), st.floats(0.0, 0.5), st.booleans(),
    st.sampled_from([0, 1, 4]), st.integers(0, 20),
)  # fmt: skip
def test_one_answer_alone_is_as_one_of_many(
    chances: list[float], row: float, draft_pass: float, neural: bool, passes: int, room: int
) -> None:
    """The short way for a single answer finds what the long way for several does."""
    survival = tuple(np.cumprod(chances).tolist())
    offer = Offer(survival, neural, passes if neural else 0, 0.01 if neural else 0.0)

    def seconds(rows: int) -> float:
        return 1.0 + row * rows

    best, rate = (0,), 1.0 / seconds(0)
    for count in range(offer.passes_for(len(survival)) + 1):
        drafts, found = _best([offer], count, 1, room, seconds, draft_pass)
        if found > rate:
            best, rate = drafts, found
    chosen = allot([offer], Prices(seconds, 0.0, draft_pass), 1, room)
    assert chosen.rate >= rate - 1e-12
    assert chosen.drafts == best or chosen.rate == pytest.approx(rate)
