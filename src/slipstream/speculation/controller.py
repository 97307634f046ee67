"""Controller: which drafter drafts for which answer, and how sure its drafts are; what became of them teaches it.

It estimates, per answer and class of confidence, how likely drafts are to be accepted, and hands the planner what each
answer's drafts would bring. How many are verified is the planner's choice, by the cost of a step
(scheduling/drafts.py). Estimates only ever look at tokens that are known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.program import Draft
from slipstream.roofline.cost import CostModel
from slipstream.scheduling import Offer, Plan
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.acceptance import (
    TAG_MEMORY,
    TAG_WEIGHT,
    Acceptance,
    AnswerAcceptance,
    PositionAcceptance,
    survival,
)
from slipstream.speculation.card import Card
from slipstream.speculation.drafter import Ask, Drafter
from slipstream.speculation.prices import TEXT_TRIAL, Prices
from slipstream.speculation.statistics import Counts, Ledger, Pace

FIRST_PAUSE, LONGEST_FIRST, LONGEST_PAUSE = 16, 128, 512
"""Tokens for which an answer that neural drafts do not pay for is left alone; twice as many each time in a row. The
first pause is longer where earlier answers of a kind came to long ones.
"""
TRIAL, HOPE = 4, 0.85
"""Drafts of a round that looks whether neural drafts pay, and the chance at which each of them is taken to be accepted:
who expects little never finds out.
"""
HOPELESS, MOST_LEFT = 8, 32
"""Verifications in a row without one token that held, of one kind of traffic, after which neural drafts leave out some
of its answers: one before they are tried again, then twice as many each time in a row, and so many at most.
"""
TEXT_RETRY = 32
"""Of so many drafts from text that do not pay by what is known, one is tried all the same."""
SETUP_ROUNDS = 32
"""Rounds over which the seconds until a drafter can begin are expected to pay."""
MOST_KNOWN = 256
"""Kinds of traffic, each with one drafter, of which is known how drafts fare; those used longest ago are forgotten."""
LEARNING, LEAST_DEARNESS, MOST_DEARNESS = 0.08, 0.3, 4.0
"""Share of what a step showed that goes into the dearness of drafts, and what a step can show at most."""
SAMPLED = 0.8
"""How likely drafts from text are to be accepted where an answer is sampled, beside one that is not, before anything
was seen.
"""
ENOUGH_ROUNDS, FAR_UNDER, SURE = 8, 0.6, 3.0
"""Verifications after which a drafter is compared with its card, the share of its promise that is too little, and the
standard deviations by which each position has to fall short: one that is no good is seldom asked, and people should
hear of it.
"""
POSITION_PRIOR = 0.6
"""Chance of a neural draft before anything was seen."""


@dataclass
class _Track:
    """What is known of drafting one answer."""

    classes: dict[str, AnswerAcceptance] = field(default_factory=dict)
    positions: dict[str, AnswerAcceptance] = field(default_factory=dict)
    declined: dict[str, int] = field(default_factory=dict)
    resume: int = 0
    pause: int = FIRST_PAUSE
    trial: bool = True


@dataclass
class _Known:
    """What is known of one drafter on one tag."""

    classes: Acceptance
    positions: PositionAcceptance
    vain: int = 0
    """Verifications in a row without a token that held."""
    pause: int = FIRST_PAUSE
    """Where the pauses of an answer begin: with half of the latest one."""
    left: int = 0
    """Answers that are left out from now on."""
    next_left: int = 1

    def tries(self) -> bool:
        """Whether neural drafts are tried for an answer that begins."""
        if self.vain < HOPELESS:
            return True
        if self.left:
            self.left -= 1
            return False
        self.left, self.next_left = self.next_left, min(2 * self.next_left, MOST_LEFT)
        return True

    def verified(self, accepted: int) -> None:
        """A neural draft was tried."""
        self.vain += 1
        if accepted:
            self.vain, self.left, self.next_left = 0, 0, 1


class Place(NamedTuple):
    """Where in the prefix cache an answer's beginning is: under which root, or, `alone`, nowhere."""

    root: str = ""
    alone: bool = False


class Controller:
    """Drafting for all answers of an engine; one of the drafters may be neural."""

    def __init__(self, drafters: Sequence[Drafter], card: Card | None = None, ledger: Ledger | None = None):
        """`card` is what the neural drafter promises, `ledger` that of the controller before, if there was one."""
        self.drafters, self.card = list(drafters), card or Card()
        self._neural = next((drafter for drafter in self.drafters if drafter.neural), None)
        self.ledger = ledger or Ledger()
        self.seen = Counts()
        """Of the neural drafter's drafts."""
        self.root = ""
        """Answers under one root of the prefix cache have the state of one drafter in their blocks."""
        self.dearness = 1.0
        """How much more verifying drafts lately cost than the cost model says: machines have moods."""
        self.asleep = 0
        """For how many tokens of the answers that were last looked at there will be no offers."""
        self.trying = False
        """Whether some of the drafts that were made last are to find out whether drafts pay: nothing is foreseen."""
        self._trials: set[int] = set()
        self._tracks: dict[int, _Track] = {}
        self._known: OrderedDict[tuple[str, str, bool], _Known] = OrderedDict()
        self._ready: dict[int, tuple[Drafter, Draft | None]] = {}

    @property
    def neural(self) -> Drafter | None:
        """The drafter that takes passes over weights, if there is one."""
        return self._neural

    def place(self, answer: Answer) -> Place:
        """Where the beginning of an answer that has just come is looked for."""
        return Place(self.root)

    def offers(self, eligible: Sequence[Answer], cost: CostModel) -> dict[int, Offer]:
        """What drafting would bring for answers that are about to decode, all their tokens known; by id."""
        self._ready.clear()
        self._trials.clear()
        offers: dict[int, Offer] = {}
        prices: Prices | None = None  # most steps have no offers, and need none
        for answer in eligible:
            most, best = answer.limit - len(answer.tokens) - 1, 0.0
            for drafter in self.drafters:
                draft = None
                if not drafter.neural and (draft := drafter.draft(answer, min(most, drafter.most))) is None:
                    continue
                offer = self._offer(drafter, answer, draft, most)
                if offer is None:
                    continue
                prices = prices or Prices(cost, eligible, self.dearness, self.neural)
                gain = prices.gain(offer)
                if drafter.neural and gain <= 0.0:
                    if self._track(answer).trial:  # whatever it might bring, its passes are too dear
                        drafter.doubt()
                    self._pause(answer)
                elif draft is not None and gain <= 0.0 and prices.worth_a_trial and self._tries_again(drafter, answer):
                    offer = Offer(survival([drafter.prior(c) for c in draft.classes[:TEXT_TRIAL]]))
                    gain = prices.gain(offer)
                    self._trials.add(id(answer))
                if gain > best:
                    best = gain
                    offers[id(answer)], self._ready[id(answer)] = offer, (drafter, draft)
        self.asleep = 0
        if not offers and self.neural is not None and len(self.drafters) == 1:
            self.asleep = min(self._track(answer).resume - answer.generated for answer in eligible)
        return offers

    def _offer(self, drafter: Drafter, answer: Answer, draft: Draft | None, most: int) -> Offer | None:
        """What a draft, or one that is still to be made, would bring."""
        most, track = min(most, drafter.most), self._track(answer)
        if draft is not None:
            chances = self._chances(drafter, answer, track)
            return Offer(survival(chances.chances(draft.classes)))
        if answer.generated < track.resume or most <= 0 or not drafter.ready(answer):
            return None
        positions = self._positions(drafter, answer, track)
        setup = drafter.setup_seconds(answer) / SETUP_ROUNDS + drafter.begin_seconds(1)
        if drafter.ranked:  # a node's rank says how likely it is, whatever comes before it
            ranks = self._chances(drafter, answer, track)
            ahead = tuple(map(drafter.prior, range(most)) if track.trial else ranks.chances(range(most)))
        else:
            hopes = [HOPE] * min(most, TRIAL) if track.trial else positions.chances(range(most))
            ahead = survival(hopes)
        return Offer(ahead, neural=True, passes=drafter.passes, setup=setup)

    def _track(self, answer: Answer) -> _Track:
        track = self._tracks.get(id(answer))
        if track is None:
            track = self._tracks[id(answer)] = _Track()
            if self.neural is not None:
                known = self._knows(self.neural, answer)
                track.pause = known.pause
                if not known.tries():
                    track.resume = answer.generated + LONGEST_PAUSE
        return track

    def draft(self, plan: Plan) -> dict[int, Draft]:
        """Make the drafts that a plan has room for, by id of the answer."""
        drafts: dict[int, Draft] = {}
        asks: dict[Drafter, list[Ask]] = {}
        for answer, _, count in plan.spans:
            if id(answer) not in self._ready:
                continue
            drafter, draft = self._ready[id(answer)]
            if not count:
                if drafter.neural:
                    self._pause(answer)
            elif draft is not None:
                drafts[id(answer)] = draft.cut(count)
            else:
                track = self._tracks[id(answer)]
                if track.trial:
                    self._trials.add(id(answer))
                track.pause, track.trial = track.pause if track.trial else FIRST_PAUSE, False
                chances = self._chances(drafter, answer, track)
                asks.setdefault(drafter, []).append(Ask(answer, count, plan.draft_price, chances.chance))
        for drafter, wanted in asks.items():
            for ask, draft in zip(wanted, drafter.propose(wanted), strict=True):
                if draft is not None and len(draft):
                    drafts[id(ask.answer)] = self._worth(draft, ask, plan.row_price)
        drafts = {key: draft for key, draft in drafts.items() if len(draft)}
        self.trying = not self._trials.isdisjoint(drafts)
        return drafts

    def _worth(self, draft: Draft, ask: Ask, price: float) -> Draft:
        """A neural draft without the rows that are not worth verifying, which its confidence tells only now.

        Of a draft that was drawn only what came before a token tells whether that one is verified: leaving out tokens
        for what they are would bend the law of those that remain.
        """
        chances = [ask.chance(c) for c in draft.classes]
        alive: list[float] = []
        for chance, parent in zip(chances, draft.parents, strict=True):
            alive.append(chance * (alive[parent] if parent >= 0 else 1.0))
        kept = len(draft)
        if draft.is_chain:
            told = alive if draft.proposals is None else [1.0, *alive[:-1]]
            kept = next((index for index, chance in enumerate(told) if chance < price), kept)
            drafter = self._ready[id(ask.answer)][0]
            positions = self._positions(drafter, ask.answer, self._tracks[id(ask.answer)])
            known = self._knows(drafter, ask.answer).positions  # without them only what it was sure of would count
            for index in range(kept, len(draft)):
                positions.observe(index, chances[index])
                known.observe(index, chances[index])
        return draft.cut(kept)

    def landed(self, answer: Answer, draft: Draft, held: Sequence[int], *, ended: bool) -> int:
        """A draft was verified, `held` of its tokens were accepted. Returns how many of its positions were tried.

        None is where the answer had `ended` before.
        """
        accepted = len(held)
        drafter = next(d for d in self.drafters if d.name == draft.drafter)
        track, known = self._tracks.get(id(answer), _Track()), self._knows(drafter, answer)
        depth = max(draft.depths) + 1
        tried = accepted if ended else min(accepted + 1, depth)
        self.ledger.verified(drafter.name, answer.tag, len(draft), accepted, tried)
        if drafter.neural:
            self.seen.add(len(draft), accepted, tried)
            if tried:
                known.verified(accepted)
        chances = self._chances(drafter, answer, track)
        if drafter.ranked:
            for index, (rank, level) in enumerate(zip(draft.classes, draft.depths, strict=True)):
                if ended and level >= accepted:  # whether it is right nobody knows
                    continue
                chances.observe(rank, float(index in held))
                known.classes.observe(rank, float(index in held))
        elif draft.is_chain:
            for index in range(tried):
                chances.observe(draft.classes[index], float(index < accepted))
                known.classes.observe(draft.classes[index], float(index < accepted))
        if drafter.neural and 2 * accepted >= len(draft):  # a trial that went well is worth another one soon
            track.pause = known.pause = FIRST_PAUSE
        if drafter.neural and not drafter.ranked:
            positions = self._positions(drafter, answer, track)
            for index in range(min(tried, drafter.most)):
                positions.observe(index, float(index < accepted))
                known.positions.observe(index, float(index < accepted))
        return tried

    def paced(self, drafted: Sequence[tuple[str, str]], spent: float, plain: float, predicted: float) -> None:
        """A step with drafts, by drafter and tag, has `spent` so long for what would take `plain` without.

        A trial is made on a hope, not on what is `predicted`: it counts as it came.
        """
        self.ledger.paced(drafted, spent, plain, plain / spent if self.trying and spent > 0.0 else predicted)

    def known(self, answers: Sequence[Answer]) -> None:
        """Tokens of answers have become known."""

    def verified(self, extra: float, expected: float) -> None:
        """Verifying the drafts of a step took so much more than plain decoding would have."""
        if expected > 0:
            seen = min(max(extra / expected, LEAST_DEARNESS), MOST_DEARNESS)
            self.dearness += LEARNING * (seen - self.dearness)

    def draft_pass(self, answers: int) -> float:
        """Seconds of one pass of the neural drafter over so many answers."""
        return self.neural.pass_seconds(answers) if self.neural is not None else 0.0

    def _tries_again(self, drafter: Drafter, answer: Answer) -> bool:
        """Whether it is time to see if what costs no passes helps by now."""
        declined = self._track(answer).declined
        declined[drafter.name] = (declined.get(drafter.name, 0) + 1) % TEXT_RETRY
        return not declined[drafter.name]

    def _pause(self, answer: Answer) -> None:
        """Leave an answer alone for which neural drafts do not pay, longer each time in a row; then try a short one."""
        track = self._tracks[id(answer)]
        track.resume = answer.generated + track.pause
        if self.neural is not None:
            self._knows(self.neural, answer).pause = min(max(track.pause // 2, FIRST_PAUSE), LONGEST_FIRST)
        track.pause = min(2 * track.pause, LONGEST_PAUSE)
        track.trial = True

    def free(self, answer: Answer, *, learn: bool = True) -> None:
        """Forget an answer that has ended; drafters may `learn` from it."""
        self._tracks.pop(id(answer), None)
        self._ready.pop(id(answer), None)
        for drafter in self.drafters:
            drafter.free(answer, learn=learn)

    def disappointed(self) -> str | None:
        """A sentence if the neural drafter is far under what its card promised."""
        if self.neural is None or self.card.tau <= 1.0:
            return None
        length, seen = self.card.draft_len or self.neural.most, self.seen
        if seen.rounds < ENOUGH_ROUNDS or seen.most_tau(length, SURE) - 1.0 >= (self.card.tau - 1.0) * FAR_UNDER:
            return None
        return (
            f"the drafter's card promises {self.card.tau:.2f} tokens a verification of {length} drafts, "
            f"{seen.rounds} verifications of this traffic come to {seen.tau_of_drafts(length):.2f}: train it on this "
            "traffic, or leave it out"
        )

    @property
    def pace(self) -> Pace:
        """Of all steps with drafts since the start."""
        return self.ledger.pace

    def counts(self) -> dict[tuple[str, str], Counts]:
        """What drafting brought since the start, by drafter and tag."""
        return self.ledger.counts()

    def _knows(self, drafter: Drafter, answer: Answer) -> _Known:
        sampled = answer.params.temperature > 0
        key = (drafter.name, answer.tag, sampled)
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
        else:
            share = SAMPLED if sampled and not (drafter.neural or drafter.certain) else 1.0

            def prior(draft_class: int) -> float:
                return share * drafter.prior(draft_class)

            known = self._known[key] = _Known(
                Acceptance(drafter.classes, prior, TAG_MEMORY, TAG_WEIGHT),
                PositionAcceptance(drafter.most, POSITION_PRIOR, TAG_MEMORY, TAG_WEIGHT),
            )
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        return known

    def _chances(self, drafter: Drafter, answer: Answer, track: _Track) -> AnswerAcceptance:
        if drafter.name not in track.classes:
            prior = self._knows(drafter, answer).classes.chance
            track.classes[drafter.name] = AnswerAcceptance(drafter.classes, prior)
        return track.classes[drafter.name]

    def _positions(self, drafter: Drafter, answer: Answer, track: _Track) -> AnswerAcceptance:
        if drafter.name not in track.positions:
            prior = self._knows(drafter, answer).positions.chance
            track.positions[drafter.name] = AnswerAcceptance(drafter.most, prior)
        return track.positions[drafter.name]
