"""What a round of speculation costs, measured at every step: v, d and what is left, apart, in plain steps."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from slipstream.engine import Chunk, Engine
from slipstream.program import Draft
from slipstream.roofline.cost import CostModel
from slipstream.scheduling import Offer, Plan
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation import Controller

LEAST = 3
"""Rounds with so many drafts whose median says something."""


class _Round(NamedTuple):
    """Seconds of a step with drafts: making them, looking whether to, and the rest, which is a verification."""

    draft: float
    look: float
    verify: float


class Rounds:
    """Watches a controller, and the steps of one answer at a time."""

    def __init__(self, controller: Controller):
        self._plain: list[float] = []
        self._rounds: dict[int, list[_Round]] = defaultdict(list)
        self._draft = self._look = 0.0
        self._drafted = 0
        offers, draft = controller.offers, controller.draft

        def timed_offers(eligible: Sequence[Answer], cost: CostModel) -> dict[int, Offer]:
            begun = time.perf_counter()
            found = offers(eligible, cost)
            self._look += time.perf_counter() - begun
            return found

        def timed_draft(plan: Plan) -> dict[int, Draft]:
            begun = time.perf_counter()
            made = draft(plan)
            self._draft += time.perf_counter() - begun
            self._drafted += sum(map(len, made.values()))
            return made

        controller.offers, controller.draft = timed_offers, timed_draft  # type: ignore[method-assign]

    def step(self, engine: Engine, number: int) -> list[Chunk]:
        """A step of the one request there is; its prompt does not count, nor does a step in which it was not drafted
        for although that was looked at.
        """
        decodes = engine.timings[number].first_token is not None
        self._draft = self._look = 0.0
        self._drafted = 0
        begun = time.perf_counter()
        chunks = engine.step()
        seconds = time.perf_counter() - begun
        if decodes and self._drafted:
            rest = seconds - self._draft - self._look
            self._rounds[self._drafted].append(_Round(self._draft, self._look, rest))
        elif decodes and engine.drafting.resting:
            self._plain.append(seconds)
        return chunks

    def report(self) -> dict[str, Any]:
        """Keys: plain_step_seconds; and by the number of drafts verify_cost, draft_cost, overhead (in plain steps) and
        rounds.
        """
        plain = statistics.median(self._plain) if self._plain else 0.0
        known = {k: found for k, found in sorted(self._rounds.items()) if len(found) >= LEAST} if plain else {}
        medians = {
            k: _Round(*(statistics.median(column) / plain for column in zip(*f, strict=True))) for k, f in known.items()
        }
        return {
            "plain_step_seconds": plain,
            "verify_cost": {str(k): cost.verify for k, cost in medians.items()},
            "draft_cost": {str(k): cost.draft for k, cost in medians.items()},
            "overhead": {str(k): cost.look for k, cost in medians.items()},
            "rounds": {str(k): len(found) for k, found in known.items()},
        }
