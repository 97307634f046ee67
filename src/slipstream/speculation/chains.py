"""Chains: drafts that grow token by token, each as long as it is likely enough to survive; and what a pass takes."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.program import Draft, Proposal
from slipstream.speculation.drafter import Ask

SETTLING = 0.1
"""Share of what a pass took that goes into what passes are taken to take."""

DOUBT = 0.9
"""What is left of a price at which a pass was declined."""


class Chains:
    """Drafts under construction, one for each ask."""

    def __init__(self, asks: Sequence[Ask], drafter: str):
        self.asks, self._drafter = asks, drafter
        self.tokens: list[list[int]] = [[] for _ in asks]
        self._classes: list[list[int]] = [[] for _ in asks]
        self._proposals: list[list[Proposal]] = [[] for _ in asks]
        self._alive = [1.0] * len(asks)

    def add(self, index: int, token: int, draft_class: int, proposal: Proposal | None) -> bool:
        """One more token of a draft; returns whether another one is worth its pass."""
        ask = self.asks[index]
        self.tokens[index].append(token)
        self._classes[index].append(draft_class)
        if proposal is not None:
            self._proposals[index].append(proposal)
        self._alive[index] *= ask.chance(draft_class)
        return len(self.tokens[index]) < ask.most and self._alive[index] >= ask.price

    def drafts(self) -> list[Draft | None]:
        """What has grown."""
        return [
            Draft.chain(tokens, classes, self._drafter, tuple(proposals) or None) if tokens else None
            for tokens, classes, proposals in zip(self.tokens, self._classes, self._proposals, strict=True)
        ]


class PassClock:
    """Seconds of a pass by how many answers it drafts for, as measured lately."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._doubted: set[int] = set()

    def observe(self, answers: int, seconds: float) -> None:
        """A pass has run."""
        bucket = 1 << (answers - 1).bit_length()
        if bucket in self._doubted:
            self._doubted.discard(bucket)
            self._seconds[bucket] = seconds
        self._seconds[bucket] = (1 - SETTLING) * self._seconds.get(bucket, seconds) + SETTLING * seconds

    def doubt(self) -> None:
        """Nobody wanted a pass at this price: it may be that of a bad moment, and is only put right by running one.

        It falls a little each time, until a pass is run; what that takes is believed at once.
        """
        self._seconds = {bucket: DOUBT * seconds for bucket, seconds in self._seconds.items()}
        self._doubted.update(self._seconds)

    def seconds(self, answers: int) -> float:
        """What a pass takes; for numbers that did not occur what the nearest takes, and 0 before the first pass."""
        if not self._seconds:
            return 0.0
        return self._seconds[min(self._seconds, key=lambda count: abs(count - answers))]
