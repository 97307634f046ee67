"""How likely drafts are to be accepted: decayed counts by class of confidence, of an answer, a tag and a drafter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

STEADY_MEMORY, WARY_MEMORY, TAG_MEMORY = 64.0, 12.0, 200.0
"""Observations of a class that count: an answer can change its subject, and then old ones mislead."""
STEADY_WEIGHT, WARY_WEIGHT, TAG_WEIGHT = 12.0, 1.5, 5.0
"""Observations that what is known from elsewhere counts as."""
MISSES = 8
"""Drafts of a class in a row that were not accepted, from which on these alone bound its chance: the prior, or what was
before, would take long to fade.
"""
SURPRISE = 2.0
"""Standard deviations from what is expected at which an answer is no longer like the others, or like itself."""


class Acceptance:
    """Chances by class, from what was seen and, until that is enough, from `prior`."""

    __slots__ = ("_decay", "_hits", "_prior", "_tries", "_weight")

    def __init__(self, classes: int, prior: Callable[[int], float], memory: float, weight: float):
        self._tries, self._hits = [0.0] * classes, [0.0] * classes
        self._prior, self._decay, self._weight = prior, 1.0 - 1.0 / memory, weight

    def chance(self, draft_class: int) -> float:
        """How likely a draft of a class is to be accepted when those before it are."""
        tries = self._tries[draft_class]
        return (self._hits[draft_class] + self._weight * self._prior(draft_class)) / (tries + self._weight)

    def observe(self, draft_class: int, accepted: float) -> None:
        """A draft was accepted (1) or not (0); in between if it was not verified, but had that chance."""
        self._tries[draft_class] = self._tries[draft_class] * self._decay + 1.0
        self._hits[draft_class] = self._hits[draft_class] * self._decay + accepted


class PositionAcceptance(Acceptance):
    """Chances by position in a draft: one that was hardly tried is taken to be like the one before it.

    Drafts end where a drafter is not sure, so that later positions are tried seldom; who took them for likely would
    go on making drafts that end at once.
    """

    __slots__ = ("_chances",)

    def __init__(self, positions: int, first: float, memory: float, weight: float):
        """`first` is what the first position is taken to be."""
        super().__init__(positions, lambda position: self.chance(position - 1) if position else first, memory, weight)
        self._chances: list[float] = []

    def chance(self, draft_class: int) -> float:
        """How likely a draft at a position is to be accepted when those before it are."""
        known = self._chances
        while len(known) <= draft_class:  # in order, each from the one before
            known.append(super().chance(len(known)))
        return known[draft_class]

    def observe(self, draft_class: int, accepted: float) -> None:
        """A draft was accepted (1) or not (0); in between if it was not verified, but had that chance."""
        super().observe(draft_class, accepted)
        del self._chances[draft_class:]


class AnswerAcceptance:
    """Chances in one answer: steady as long as it goes as expected, wary once it does not.

    The few observations of one answer are noisy, and who drafts most where the estimate happens to be high expects too
    much and chooses wrongly: so what other answers showed counts for much. But an answer that changes its subject shows
    it within a few drafts; then only what it did lately counts.
    """

    __slots__ = ("_decay", "_expected", "_misses", "_most", "_now", "_seen", "_steady", "_variance", "_wary")

    def __init__(self, classes: int, prior: Callable[[int], float]):
        self._steady = Acceptance(classes, prior, STEADY_MEMORY, STEADY_WEIGHT)
        self._wary = Acceptance(classes, prior, WARY_MEMORY, WARY_WEIGHT)
        self._now = self._steady
        self._expected = self._seen = self._variance = 0.0
        self._decay = 1.0 - 1.0 / WARY_MEMORY
        self._misses, self._most = [0] * classes, [1.0] * classes

    @property
    def surprised(self) -> bool:
        """Whether far fewer drafts, or far more, were accepted lately than was expected."""
        return abs(self._seen - self._expected) > SURPRISE * math.sqrt(self._variance + 0.25)

    def chance(self, draft_class: int) -> float:
        """How likely a draft of a class is to be accepted when those before it are."""
        return min(self._now.chance(draft_class), self._most[draft_class])

    def chances(self, classes: Iterable[int]) -> list[float]:
        """The same of several."""
        now, most = self._now.chance, self._most
        return [min(now(draft_class), most[draft_class]) for draft_class in classes]

    def observe(self, draft_class: int, accepted: float) -> None:
        """A draft was accepted (1) or not (0); in between if it was not verified, but had that chance."""
        chance = self._steady.chance(draft_class)
        self._expected = self._expected * self._decay + chance
        self._variance = self._variance * self._decay + chance * (1.0 - chance)
        self._seen = self._seen * self._decay + accepted
        self._steady.observe(draft_class, accepted)
        self._wary.observe(draft_class, accepted)
        self._now = self._wary if self.surprised else self._steady
        if 0.0 < accepted < 1.0:
            return
        misses = self._misses[draft_class] = 0 if accepted else self._misses[draft_class] + 1
        self._most[draft_class] = 1.0 / (misses + 1.0) if misses >= MISSES else 1.0


def survival(chances: list[float]) -> tuple[float, ...]:
    """How likely each of a chain's drafts is to survive: it and all before it are accepted."""
    survivals, product = [], 1.0
    for chance in chances:
        product *= chance
        survivals.append(product)
    return tuple(survivals)
