"""How likely drafts are to be accepted: decayed counts by class of confidence, of an answer, a tag and a drafter."""

from __future__ import annotations

from collections.abc import Callable

ANSWER_MEMORY, TAG_MEMORY = 12.0, 200.0
"""Observations of a class that count: an answer can change its subject, and then old ones mislead."""
ANSWER_WEIGHT, TAG_WEIGHT = 1.5, 5.0
"""Observations that what is known from elsewhere counts as."""


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


def survival(chances: list[float]) -> tuple[float, ...]:
    """How likely each of a chain's drafts is to survive: it and all before it are accepted."""
    survivals, product = [], 1.0
    for chance in chances:
        product *= chance
        survivals.append(product)
    return tuple(survivals)
