"""The speculation formula: against simulation, its inverse, its break-even and its best length."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import UsageError
from slipstream.roofline.speculation import (
    ACCEPTANCES,
    DraftPlan,
    acceptance_of,
    break_even,
    report,
    simple_speedup,
    speedup,
    tau_of,
)


def test_tau_is_the_mean_of_simulated_rounds() -> None:
    rng = random.Random(1)
    for acceptance, length in ((0.3, 2), (0.7, 5), (0.95, 8)):
        tokens = 0
        for _ in range(20_000):
            accepted = 0
            while accepted < length and rng.random() < acceptance:
                accepted += 1
            tokens += accepted + 1
        assert tau_of(acceptance, length) == pytest.approx(tokens / 20_000, rel=0.02)


@given(st.floats(0, 1), st.integers(1, 32))
def test_acceptance_inverts_tau(acceptance: float, length: int) -> None:
    assert tau_of(acceptance_of(tau_of(acceptance, length), length), length) == pytest.approx(
        tau_of(acceptance, length)
    )


@given(st.floats(1, 5), st.floats(0, 1), st.integers(4, 16), st.floats(0, 0.5))
def test_break_even_is_where_the_speedup_is_one(tau: float, cost: float, length: int, overhead: float) -> None:
    verify, draft = (lambda n: 1 + 0.05 * n), (lambda k: cost * k)
    least = break_even(length, verify, draft, overhead)
    assert speedup(least, length, verify, draft, overhead) == pytest.approx(1)
    assert (speedup(tau, length, verify, draft, overhead) > 1) == (tau > least)


def test_by_hand() -> None:
    # v(6) = 1.25, d(5) = 0.35, o = 0: 3.2 / 1.6; the simple rule leaves the verification out: 3.2 / 1.35.
    assert speedup(3.2, 5, lambda n: 1.25, lambda k: 0.07 * k) == pytest.approx(2.0)
    assert simple_speedup(3.2, 0.07, 5) == pytest.approx(3.2 / 1.35)


def test_the_best_length_is_the_best() -> None:
    plan = DraftPlan.parse("tau=3.2,c=0.07,k=5")
    result = report(plan, lambda rows: 1 + 0.04 * (rows - 1))
    assert result.best_speedup == max(row[3] for row in result.table) >= result.speedup
    assert {k: gain for k, _, _, gain in result.table}[5] == pytest.approx(result.speedup)
    for length, cells in result.grid:
        for acceptance, (tau, gain) in zip(ACCEPTANCES, cells, strict=True):
            assert tau == tau_of(acceptance, length)
            assert gain == pytest.approx(tau / result.table[length - 1][2])
    costly = report(DraftPlan.parse("tau=3.2,c=0.07,k=5"), lambda rows: float(rows))
    assert costly.best_speedup < 1
    assert costly.best_draft_len == 1


@pytest.mark.parametrize(
    "text", ["", "tau=2", "tau=2,c=0.1,k=0", "tau=2,c=0.1,k=1.5", "tau=9,c=0.1,k=3", "tau=0.5,c=0,k=2", "tau=x,c=1,k=1",
             "tau=2,c=-1,k=3", "tau=2,c=0.1,k=3,z=1", "tau=nan,c=0.1,k=3"]
)  # fmt: skip
def test_bad_plans_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        DraftPlan.parse(text)
