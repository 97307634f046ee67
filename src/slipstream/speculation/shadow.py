"""Shadow: a drafter that looks on. It proposes for answers that others draft for, and nothing of it is verified.

It keeps its own state in the answers' blocks, of its own cache. Where it cannot (the answer began before it looked on,
or lost its blocks), it leaves the answer alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.program import BLOCK_SLOTS
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.drafter import Ask, Computed, Drafter
from slipstream.speculation.statistics import Counts

DRAFT = 4
"""Tokens that it proposes at a time."""


@dataclass
class _Seen:
    """An answer as the shadow sees it: its twin has the same tokens and blocks, and what the shadow has of it."""

    twin: Answer
    blocks: list[int]
    at: int = 0
    draft: tuple[int, ...] = ()
    counts: Counts = field(default_factory=Counts)
    blind: bool = field(default=False)


class Shadow:
    """Counts what a drafter would have brought."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self._seen: dict[int, _Seen] = {}

    def commit(self, computed: Sequence[Computed]) -> None:
        """The target has computed tokens of answers that are looked at."""
        told = []
        for answer, start, tokens, taps in computed:
            seen = self._seen.get(id(answer))
            if seen is None:
                twin = copy.copy(answer)
                twin.drafted = 0
                seen = self._seen[id(answer)] = _Seen(twin, list(answer.blocks), blind=start > 0)
            if seen.blind or self._lost(seen, answer):
                continue
            told.append(Computed(seen.twin, start, tokens, taps))
        self.drafter.commit(told)

    def _lost(self, seen: _Seen, answer: Answer) -> bool:
        """Whether blocks have changed hands, so that the shadow's state in them is not the answer's any more."""
        if answer.blocks is not seen.twin.blocks or answer.blocks[: len(seen.blocks)] != seen.blocks:
            self.drafter.free(seen.twin)
            seen.blind, seen.draft = True, ()
            return True
        seen.blocks = list(answer.blocks)
        return False

    def look(self, answers: Sequence[Answer]) -> None:
        """Tokens have become known: judge what was proposed, and propose anew."""
        asks = []
        for answer in answers:
            seen = self._seen.get(id(answer))
            if seen is None or seen.blind or answer.ended or self._lost(seen, answer) or not self._judged(seen, answer):
                continue
            room = len(answer.blocks) * BLOCK_SLOTS - len(answer.tokens)
            if room >= self.drafter.scratch(DRAFT) and self.drafter.ready(seen.twin):
                asks.append((seen, Ask(seen.twin, DRAFT, 0.0, lambda draft_class: 1.0)))
        if not asks:
            return
        for (seen, ask), draft in zip(asks, self.drafter.propose([ask for _, ask in asks]), strict=True):
            if draft is not None:
                tokens = draft.tokens if draft.is_chain else draft.path(len(draft) - 1)
                seen.at, seen.draft = len(ask.answer.tokens), tuple(tokens)

    @staticmethod
    def _judged(seen: _Seen, answer: Answer) -> bool:
        """Count what was proposed if enough is known to; whether nothing is left to be judged."""
        if not seen.draft:
            return True
        said = answer.tokens[seen.at : seen.at + len(seen.draft)]
        accepted = 0
        while accepted < len(said) and said[accepted] == seen.draft[accepted]:
            accepted += 1
        if accepted == len(said) < len(seen.draft):
            return False
        seen.counts.add(len(seen.draft), accepted, min(accepted + 1, len(seen.draft)))
        seen.draft = ()
        return True

    def end(self, answer: Answer) -> Counts:
        """An answer has ended; returns what became of the proposals."""
        seen = self._seen.pop(id(answer), None)
        if seen is None:
            return Counts()
        if not seen.blind:
            self.drafter.free(seen.twin)
        return seen.counts
