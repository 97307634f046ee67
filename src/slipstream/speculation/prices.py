"""What drafts of one answer would bring, less what their seconds would have brought otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from slipstream.program import StepShape
from slipstream.roofline.cost import CostModel
from slipstream.scheduling import Offer
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.drafter import Drafter

TEXT_TRIAL = 2
"""Drafts, at most, of text that is tried although it does not pay by what is known."""


class Prices:
    """What drafts cost in a step of `eligible` decodes, each taken as the only one that drafts."""

    def __init__(self, cost: CostModel, eligible: Sequence[Answer], dearness: float, neural: Drafter | None):
        count = len(eligible)
        step = StepShape(count, count, 0, sum(answer.length for answer in eligible))
        self._extra = cost.extra_rows(step, eligible[0].computed)
        self._drafted, self._dearness = cost.drafted, dearness
        self._rate = count / cost.seconds(step)
        self._pass = neural.pass_seconds(count) / count if neural is not None else 0.0

    @cached_property
    def worth_a_trial(self) -> bool:
        """Whether a draft from text that was not expected to hold, but does, brings more than one costs that does not.

        With many answers side by side a row is nearly as dear as a token.
        """
        return self.gain(Offer((1.0,) * TEXT_TRIAL)) > TEXT_TRIAL / 2

    def gain(self, offer: Offer) -> float:
        """Tokens that the best draft of an offer brings, less those that its seconds would have brought otherwise."""
        tokens, best, left = 0.0, 0.0, sum(offer.survival)
        for drafts, chance in enumerate(offer.survival, 1):
            tokens += chance
            verify = self._dearness * (self._extra(drafts) + self._drafted)
            seconds = verify + offer.setup + offer.passes_for(drafts) * self._pass
            gain = tokens - self._rate * seconds
            if gain > best:
                best = gain
            left -= chance
            if gain + left <= best:  # all that is left cannot make up for it
                break
        return best
