"""Chains: drafts that grow token by token, each as long as it is likely enough to survive; and what a pass takes."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from slipstream.program import Draft, Proposal
from slipstream.speculation.drafter import Ask

LATEST = 9
"""Passes whose median is what a pass takes: one in a bad moment does not show."""
DOUBT = 0.9
"""What is left of a price at which a pass was declined."""


class Chains:
    """Drafts under construction, one for each ask."""

    def __init__(self, asks: Sequence[Ask], drafter: str):
        self.asks, self._drafter = asks, drafter
        self.tokens: list[list[int]] = [[] for _ in asks]
        self._classes: list[list[int]] = [[] for _ in asks]
        self._proposals: list[list[Proposal]] = [[] for _ in asks]
        self.alive = [1.0] * len(asks)

    def add(self, index: int, token: int, draft_class: int, proposal: Proposal | None) -> bool:
        """One more token of a draft; returns whether another one is worth its pass."""
        ask = self.asks[index]
        self.tokens[index].append(token)
        self._classes[index].append(draft_class)
        if proposal is not None:
            self._proposals[index].append(proposal)
        self.alive[index] *= ask.chance(draft_class)
        return len(self.tokens[index]) < ask.most and self.alive[index] >= ask.price

    def drafts(self) -> list[Draft | None]:
        """What has grown."""
        return [
            Draft.chain(tokens, classes, self._drafter, tuple(proposals) or None) if tokens else None
            for tokens, classes, proposals in zip(self.tokens, self._classes, self._proposals, strict=True)
        ]


class PassClock:
    """Seconds of a pass by how many answers it drafts for: the median of the latest.

    The first pass of a kind does not count: it finds everything cold, takes ten times as long, and would keep all
    others away.
    """

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}
        self._doubts: dict[int, float] = {}

    def observe(self, answers: int, seconds: float) -> None:
        """A pass has run."""
        bucket = 1 << (answers - 1).bit_length()
        if bucket not in self._latest:
            self._latest[bucket] = deque(maxlen=LATEST)
            return
        if self._doubts.pop(bucket, None) is not None:
            self._latest[bucket].clear()
        self._latest[bucket].append(seconds)

    def doubt(self) -> None:
        """Nobody wanted a pass at this price: it may be that of a bad moment, and is only put right by running one.

        It falls a little each time, until a pass is run; what that takes is believed at once.
        """
        for bucket in self._latest:
            self._doubts[bucket] = DOUBT * self._doubts.get(bucket, 1.0)

    def seconds(self, answers: int) -> float:
        """What a pass takes; for numbers that did not occur what the nearest takes, and 0 before the second pass."""
        known = [bucket for bucket, latest in self._latest.items() if latest]
        if not known:
            return 0.0
        nearest = min(known, key=lambda count: abs(count - answers))
        return statistics.median(self._latest[nearest]) * self._doubts.get(nearest, 1.0)
