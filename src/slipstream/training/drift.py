"""Drift: whether drafts are accepted less than they were, by tag, as recorded answers tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

RECENT, EARLIER = 100, 400
"""Answers of a tag that are compared: the newest ones, and those before them."""
LEAST = 20
SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Drift:
    """Tokens of a step, earlier and of late, with 95 % intervals. `drifted`: the intervals say that it became less."""

    tag: str
    answers: int
    earlier: float
    earlier_interval: tuple[float, float]
    recent: float
    recent_interval: tuple[float, float]

    @property
    def drifted(self) -> bool:
        """Whether drafts are surely accepted less than before."""
        return self.recent_interval[1] < self.earlier_interval[0]


def drift(answers: Iterable[tuple[str, Sequence[int]]]) -> list[Drift]:
    """By tag, of (tag, tokens that each step brought) of what was served here, in order of time.

    Tags with too few answers are left out.
    """
    by_tag: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for tag, steps in answers:
        if len(steps) > 1:  # the first step's token comes with the prompt
            by_tag[tag].append((sum(steps[1:]), len(steps) - 1))
    found = []
    for tag, found_of in sorted(by_tag.items()):
        recent, earlier = found_of[-RECENT:], found_of[-RECENT - EARLIER : -RECENT]
        if len(recent) < LEAST or len(earlier) < LEAST:
            continue
        found.append(
            Drift(tag, len(found_of), _rate(earlier), _interval(earlier), _rate(recent), _interval(recent))
        )  # fmt: skip
    return found


def _rate(answers: Sequence[tuple[int, int]]) -> float:
    return sum(tokens for tokens, _ in answers) / sum(steps for _, steps in answers)


def _interval(answers: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """The bootstrap's, over answers."""
    numbers = np.array(answers, np.float64)
    chosen = np.random.default_rng(0).integers(0, len(numbers), (SAMPLES, len(numbers)))
    sums = numbers[chosen].sum(1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], (0.025, 0.975))
    return float(low), float(high)
