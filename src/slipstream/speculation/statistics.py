"""What drafting brought: counts by drafter and tag, as usage and metrics show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

MOST_POSITIONS = 16
"""Positions of a draft whose acceptance is kept apart; later ones are not counted by position."""
MOST_KINDS, OTHERS = 256, "others"
"""Kinds of traffic (drafter and tag) that a ledger keeps apart, and the tag of those that came later."""


@dataclass
class Counts:
    """Verifications (`rounds`) with a draft, tokens drafted and accepted, tries and hits by position in the draft.

    A position is tried when all drafts before it were accepted: hits ÷ tries is its conditional acceptance.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tries: list[int] = field(default_factory=lambda: [0] * MOST_POSITIONS)
    hits: list[int] = field(default_factory=lambda: [0] * MOST_POSITIONS)

    def add(self, drafted: int, accepted: int, tried: int) -> None:
        """A verification in which `tried` positions were looked at, `accepted` of them held."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        for position in range(min(tried, MOST_POSITIONS)):
            self.tries[position] += 1
            self.hits[position] += position < accepted

    def merge(self, other: Counts) -> None:
        """Add another's."""
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.tries = [a + b for a, b in zip(self.tries, other.tries, strict=True)]
        self.hits = [a + b for a, b in zip(self.hits, other.hits, strict=True)]

    @property
    def tau(self) -> float:
        """Mean tokens of a verification with a draft, the bonus token included."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def conditional(self) -> list[float]:
        """Acceptance by position, given that all before it were accepted; as far as there is any."""
        return [hits / tries for hits, tries in zip(self.hits, self.tries, strict=True) if tries]

    def tau_of_drafts(self, length: int) -> float:
        """Mean tokens of a verification of so many drafts, whatever the lengths were, by acceptance at each position.

        A position that was never tried is taken to be like the one before it.
        """
        return _tau(self.conditional(), length)

    def most_tau(self, length: int, deviations: float) -> float:
        """What that is at most, each position's acceptance so many standard deviations up (Wilson's bound)."""
        square = deviations * deviations
        bounds = []
        for hits, tries in zip(self.hits, self.tries, strict=True):
            if tries:
                share = hits / tries
                doubt = deviations * math.sqrt((share * (1.0 - share) + square / (4 * tries)) / tries)
                bounds.append((share + square / (2 * tries) + doubt) / (1.0 + square / tries))
        return _tau(bounds, length)


def _tau(chances: Sequence[float], length: int) -> float:
    tau = alive = 1.0
    for position in range(length if chances else 0):
        alive *= chances[min(position, len(chances) - 1)]
        tau += alive
    return tau


@dataclass
class Pace:
    """Seconds of steps with drafts, and what the cost model says plain decoding would have taken for their tokens."""

    steps: int = 0
    spent: float = 0.0
    plain: float = 0.0
    predicted: float = 0.0

    def add(self, spent: float, plain: float, predicted: float) -> None:
        """A step that took `spent`, for tokens worth `plain` seconds; its speed-up was expected to be `predicted`."""
        self.steps += 1
        self.spent += spent
        self.plain += plain
        self.predicted += predicted * spent

    @property
    def measured_speedup(self) -> float:
        """S over these steps."""
        return self.plain / self.spent if self.spent else 1.0

    @property
    def predicted_speedup(self) -> float:
        """S that was expected, each step weighed with its seconds."""
        return self.predicted / self.spent if self.spent else 1.0


@dataclass
class _Kind:
    counts: Counts = field(default_factory=Counts)
    pace: Pace = field(default_factory=Pace)


class Ledger:
    """What drafting brought an engine since its start, whichever controllers came and went: nothing in it ever falls.

    A tag that comes when there are many already is counted among OTHERS, for good.
    """

    def __init__(self) -> None:
        self.pace = Pace()
        """Of all steps with drafts."""
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def _kind(self, drafter: str, tag: str) -> _Kind:
        kind = self._kinds.get((drafter, tag))
        if kind is None:
            if len(self._kinds) >= MOST_KINDS:
                tag = OTHERS
            kind = self._kinds.setdefault((drafter, tag), _Kind())
        return kind

    def verified(self, drafter: str, tag: str, drafted: int, accepted: int, tried: int) -> None:
        """A verification; see `Counts.add`."""
        self._kind(drafter, tag).counts.add(drafted, accepted, tried)

    def paced(self, drafted: Sequence[tuple[str, str]], spent: float, plain: float, predicted: float) -> None:
        """A step with drafts, by drafter and tag; see `Pace.add`."""
        self.pace.add(spent, plain, predicted)
        for drafter, tag in drafted:
            self._kind(drafter, tag).pace.add(spent / len(drafted), plain / len(drafted), predicted)

    def counts(self) -> dict[tuple[str, str], Counts]:
        """By drafter and tag."""
        return {key: kind.counts for key, kind in self._kinds.items()}

    def pace_of(self, drafter: str, tag: str) -> Pace:
        """Of the steps with drafts of one drafter and tag, shared with whoever drafted in them, too."""
        return self._kinds[drafter, tag].pace
