"""What drafting brought is counted so that no figure ever falls, and compared at lengths that nobody may have tried."""

from __future__ import annotations

import random

import pytest

from slipstream.speculation.statistics import MOST_KINDS, OTHERS, Counts, Ledger


def drawn(rng: random.Random, rounds: int, chances: list[float], most: int) -> Counts:
    """Verifications of drafts of up to `most` tokens."""
    counts = Counts()
    for _ in range(rounds):
        length = rng.randint(1, most)
        held = next((n for n in range(length) if rng.random() >= chances[n]), length)
        counts.add(length, held, min(held + 1, length))
    return counts


def test_the_pace_of_every_drafter_and_tag() -> None:
    ledger = Ledger()
    ledger.paced([("a", "x")], 1.0, 2.0, 1.8)
    ledger.paced([("a", "x"), ("b", "y")], 2.0, 3.0, 1.4)
    assert ledger.pace.measured_speedup == pytest.approx(5 / 3)
    assert ledger.pace_of("a", "x").measured_speedup == pytest.approx(3.5 / 2)
    assert ledger.pace_of("b", "y").measured_speedup == pytest.approx(1.5)
    assert ledger.pace_of("b", "y").predicted_speedup == pytest.approx(1.4)


def test_kinds_that_come_late_are_counted_together() -> None:
    """However many there are, figures are bounded, sums are right, and none falls."""
    ledger, rng, shown = Ledger(), random.Random(0), dict[tuple[str, str], tuple[int, int]]()
    for number in range(4 * MOST_KINDS):
        tag = str(rng.randint(0, number))
        ledger.verified("suffix", tag, 4, 2, 3)
        ledger.paced([("suffix", tag)], 1.0, 2.0, 1.5)
        now = {key: (c.rounds, ledger.pace_of(*key).steps) for key, c in ledger.counts().items()}
        assert all(now[key] >= figures for key, figures in shown.items())
        shown = now
    assert len(shown) == MOST_KINDS + 1
    assert ledger.counts()["suffix", OTHERS].rounds > MOST_KINDS
    assert sum(rounds for rounds, _ in shown.values()) == 4 * MOST_KINDS == ledger.pace.steps


def test_tau_of_drafts_does_not_depend_on_the_lengths_that_were_drafted() -> None:
    rng, chances = random.Random(1), [0.9, 0.8, 0.7, 0.6, 0.5]
    expected = 1 + 0.9 + 0.9 * 0.8 + 0.9 * 0.8 * 0.7
    for most in (3, 5):
        assert drawn(rng, 20_000, chances, most).tau_of_drafts(3) == pytest.approx(expected, rel=0.01)
    assert drawn(rng, 20_000, [0.8], 1).tau_of_drafts(3) == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3, rel=0.02)
    assert Counts().tau_of_drafts(5) == 1.0


def test_what_tau_is_at_most_it_is() -> None:
    """Of many drafters by luck, hardly one is better than the bound at three standard deviations; and it closes in."""
    rng, chances = random.Random(2), [0.8, 0.6, 0.5]
    true = 1 + 0.8 + 0.8 * 0.6 + 0.8 * 0.6 * 0.5
    bounds = [drawn(rng, 60, chances, 3).most_tau(3, 3.0) for _ in range(500)]
    assert sum(bound < true for bound in bounds) <= 2
    assert drawn(rng, 50_000, chances, 3).most_tau(3, 3.0) == pytest.approx(true, rel=0.03)
    assert drawn(rng, 12, [0.0], 1).most_tau(5, 3.0) < 2.0, "a dozen in vain are enough to tell"
