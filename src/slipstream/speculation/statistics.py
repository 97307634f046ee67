"""What drafting brought: counts by drafter and tag, as usage and metrics show them."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_POSITIONS = 16
"""Positions of a draft whose acceptance is kept apart; later ones are not counted by position."""


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
