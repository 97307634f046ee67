"""Which draft tokens a step verifies: those that bring more tokens a second than the step has without them.

The rule is that of DSpark's scheduler: sort the drafts of all sequences by how likely each is to survive, and take them
as long as expected tokens ÷ seconds rises. Only what was estimated before the tokens are drawn counts, so that nothing
depends on a later token. And nobody pays for another's drafts: a step grows by no more than what whoever gains least in
it gains himself, but for a little slack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

SLACK = 0.02
"""Share by which a step may grow for the sake of drafts although somebody in it gains nothing by them."""
GIVE_UP = 0.9
"""Below this share of the best rate found, taking still more drafts is not looked into."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What drafting a sequence is expected to bring.

    `survival[i]` is how likely draft i (and so all before it) is to be accepted. A `neural` draft is still to be made,
    in passes of the drafter over all the sequences it drafts for: `passes` of them however long it is, or, where that
    is 0, one for each token. `setup` are the seconds until it can begin.
    """

    survival: tuple[float, ...]
    neural: bool = False
    passes: int = 0
    setup: float = 0.0

    def passes_for(self, drafts: int) -> int:
        """Passes of the drafter that so many drafts take."""
        return (self.passes or drafts) if self.neural and drafts else 0

    def within(self, passes: int) -> tuple[float, ...]:
        """The drafts that so many passes make."""
        if not self.neural:
            return self.survival
        return (self.survival if passes >= self.passes else ()) if self.passes else self.survival[:passes]


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds: `step(n)` of the step with n draft rows, `sunk` the part of it that prompts add, `draft_pass` of one
    pass of the neural drafter over all sequences that want it.
    """

    step: Callable[[int], float]
    sunk: float = 0.0
    draft_pass: float = 0.0


@dataclass(frozen=True, slots=True)
class Allotment:
    """Drafts that each offer gets, in order, and the expected tokens a second with and without them."""

    drafts: tuple[int, ...]
    rate: float
    plain: float

    @property
    def speedup(self) -> float:
        """S, as predicted."""
        return self.rate / self.plain if self.plain else 1.0


def allot(offers: Sequence[Offer], prices: Prices, decodes: int, room: int) -> Allotment:
    """Choose how many drafts of each offer to verify, `room` at most, in a step of `decodes` rows without them."""
    known: dict[int, float] = {}

    def seconds(rows: int) -> float:
        if rows not in known:
            known[rows] = max(prices.step(rows) - prices.sunk, 1e-9)
        return known[rows]

    plain = decodes / seconds(0)
    if decodes == len(offers) == 1:
        return _alone(offers[0], plain, seconds, prices.draft_pass, room)
    best, best_drafts = plain, (0,) * len(offers)
    deepest = max((offer.passes_for(len(offer.survival)) for offer in offers), default=0)
    for passes in range(deepest + 1):
        drafts, rate = _best(offers, passes, decodes, room, seconds, prices.draft_pass)
        if rate > best:
            best, best_drafts = rate, drafts
        elif passes and rate < GIVE_UP * best:
            break
    return Allotment(best_drafts, best, plain)


def _alone(offer: Offer, plain: float, seconds: Callable[[int], float], draft_pass: float, room: int) -> Allotment:
    """For a single answer in the step, whose drafts are taken in their order: one look at each length."""
    best, chosen, tokens, bare = plain, 0, 1.0, seconds(0)
    setup = offer.setup if offer.neural else 0.0
    for count, chance in enumerate(sorted(offer.survival, reverse=True)[:room], 1):
        tokens += chance
        took = seconds(count) + offer.passes_for(count) * draft_pass + setup
        rate = tokens / took
        if rate > best and took <= (1.0 + max(SLACK, tokens - 1.0)) * bare:
            best, chosen = rate, count
        elif rate < GIVE_UP * best and not offer.passes:  # a block's first token bears all of its passes
            break
    return Allotment((chosen,), best, plain)


def _best(
    offers: Sequence[Offer],
    passes: int,
    decodes: int,
    room: int,
    seconds: Callable[[int], float],
    draft_pass: float,
) -> tuple[tuple[int, ...], float]:
    """The best drafts, and their rate, when the neural drafter makes so many passes."""
    candidates = [
        (-chance, depth, index)
        for index, offer in enumerate(offers)
        for depth, chance in enumerate(offer.within(passes))
    ]
    candidates.sort()
    extra = passes * draft_pass
    if passes:
        extra += sum(offer.setup for offer in offers if offer.neural)
    tokens, bare = float(decodes), seconds(0)
    gains = [0.0] * max(decodes, len(offers))
    best, best_taken = (tokens / (bare + extra), 0)
    for taken, (chance, _, index) in enumerate(candidates[:room], 1):
        tokens -= chance
        gains[index] -= chance
        took = seconds(taken) + extra
        rate = tokens / took
        if rate > best and took <= (1.0 + max(SLACK, min(gains))) * bare:
            best, best_taken = rate, taken
        elif rate < GIVE_UP * best:
            break
    drafts = [0] * len(offers)
    for _, _, index in candidates[:best_taken]:
        drafts[index] += 1
    return tuple(drafts), best
