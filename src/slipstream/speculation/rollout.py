"""Rollout: a new drafter beside the present one, from looking on, over a share of the answers, to all of them.

    shadow   the candidate proposes for a share of the answers, and nothing of it is verified; how far it would have
             been right is seen when the answer goes on.
    canary   a share of the answers is drafted by the candidate, the others by the present drafter.
    all      the candidate drafts for all; the old one is kept, and is back at once if the candidate falls short.

Between the stages nothing but the estimates decides: enough answers, and a lower bound of the candidate's tau that is
not under the present drafter's tau (that of before, where it drafts no more), or, where no neural drafter is at work,
not under what is worth the trouble.
What was deployed to all is judged by its first answers there: later ones may be of traffic that the old one never saw.
Looking on, a candidate also drafts where text repeats, which is easy: that it is as good as it seemed, the canary has
to show, in which both drafters are asked alike. Answers are never changed by any of this: drafts are verified as ever.

A drafter's state lies in blocks of the cache beside the target's, and blocks that were computed for another drafter's
answers lack it. So a candidate's answers have beginnings of their own in the prefix cache, and those that are looked at
share none.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from slipstream.program import Draft
from slipstream.roofline.cost import CostModel
from slipstream.scheduling import Offer, Plan
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.both import Both
from slipstream.speculation.card import Card
from slipstream.speculation.controller import Controller, Place
from slipstream.speculation.drafter import Computed, Drafter
from slipstream.speculation.shadow import DRAFT, Shadow
from slipstream.speculation.statistics import Counts

Stage = Literal["shadow", "canary", "all"]
STAGES: tuple[Stage, ...] = ("shadow", "canary", "all")
ENOUGH_ANSWERS, ENOUGH_ROUNDS = 24, 400
"""Of each drafter, before anything is decided."""
PATIENCE = 3 * ENOUGH_ANSWERS
"""Answers of the candidate after which it is no longer waited for a present drafter that hardly drafts."""
LEAST_TAU = 1.2
"""What a candidate has to bring where there is no neural drafter to compare it with."""
Z = 1.645
"""Standard deviations below the mean of a lower bound that holds in 95 of 100 cases."""
REMEMBERED = 400
"""Answers by which a drafter is judged, the latest ones; and so many first ones where it drafts for all."""

log = logging.getLogger(__name__)
_NUMBERS = itertools.count(1)


@dataclass
class Arm:
    """What one drafter has brought, answer by answer: how often each of the first positions was tried, and was right.

    The planner drafts more for the surer one, and where text repeats it asks neither: so that drafters can be compared,
    tau is that of drafts of one length, from acceptance by position.
    """

    name: str
    answers: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def add(self, tries: Sequence[int], hits: Sequence[int]) -> None:
        """An answer has ended."""
        if tries[0]:
            self.answers.append((tuple(tries[:DRAFT]), tuple(hits[:DRAFT])))
            del self.answers[:-REMEMBERED]

    @property
    def rounds(self) -> int:
        """Verifications of all."""
        return sum(tries[0] for tries, _ in self.answers)

    @property
    def enough(self) -> bool:
        """Whether there is enough to decide by."""
        return len(self.answers) >= ENOUGH_ANSWERS and self.rounds >= ENOUGH_ROUNDS

    @property
    def tau(self) -> float:
        """Tokens of a verification of DRAFT tokens, the bonus token included."""
        return float(_tau(*self._sums())) if self.answers else 1.0

    @property
    def error(self) -> float:
        """Standard error of tau by the jackknife: answers are independent of one another, their verifications not."""
        count = len(self.answers)
        if count < 2:
            return math.inf
        tries, hits = self._sums()
        each = np.array(self.answers)
        without = _tau(tries - each[:, 0], hits - each[:, 1])
        return float(np.sqrt((count - 1) / count * np.square(without - without.mean()).sum()))

    @property
    def lower(self) -> float:
        """What tau is at least, in all likelihood."""
        return self.tau - Z * self.error if len(self.answers) > 1 else 1.0

    def _sums(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        tries, hits = np.array(self.answers).sum(0)
        return tries, hits


def _tau_of(present: Controller) -> float | None:
    """Tau of a controller's neural drafter before there was a candidate; None without one that has drafted enough."""
    return present.seen.tau_of_drafts(DRAFT) if present.seen.tries[0] >= ENOUGH_ROUNDS else None


def _tau(tries: npt.NDArray[np.int64], hits: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Of counts [..., DRAFT]. A position that was never tried is taken to be like the one before it."""
    chance = np.zeros(tries.shape[:-1])
    alive, tau = np.ones_like(chance), np.ones_like(chance)
    for position in range(DRAFT):
        tried = tries[..., position]
        chance = np.where(tried > 0, hits[..., position] / np.maximum(tried, 1), chance)
        alive = alive * chance
        tau = tau + alive
    return tau


class Rollout(Controller):
    """A controller with a candidate. Text drafters are shared; each neural drafter has what it learned for itself."""

    def __init__(
        self,
        present: Controller,
        candidate: Drafter,
        card: Card,
        stage: Stage,
        share: float,
        *,
        auto: bool,
        under_way: Sequence[Answer] = (),
    ):
        """`share` is that of the answers which the candidate looks at, or drafts for. With `auto` it goes on by itself.

        Answers `under_way` stay with the present drafter. Both neural drafters must read the same layers of the target.
        """
        text = [drafter for drafter in present.drafters if not drafter.neural]
        super().__init__(text, card, present.ledger)
        self.present, self.candidate = present, Controller([*text, candidate], card, present.ledger)
        self.candidate.root = f"drafter {next(_NUMBERS)}"
        self.stage: Stage = stage
        self.share, self.auto = share, auto
        self.outcome: str | None = None
        """Why the candidate was taken back, once it was."""
        self.arms = {"present": Arm("present"), "candidate": Arm("candidate")}
        self._shadow = Shadow(candidate)
        drafters = [drafter for drafter in (present.neural, candidate) if drafter is not None]
        self._both = Both(drafters, lambda answer: self._of(answer).neural, self._looked_at)
        self._ours: dict[int, tuple[Answer, Controller]] = {id(a): (a, present) for a in under_way}
        self._seen: dict[int, Counts] = {id(answer): Counts() for answer in under_way}
        self._ended: dict[int, Controller] = {}
        self._asking: dict[str, int] = {"present": 0, "candidate": 0}
        self._before = _tau_of(present)
        self._judged = 0  # answers of the stage "all"

    @property
    def neural(self) -> Drafter | None:
        """Both, as one: state of an answer is kept by the drafter that it was given to."""
        return self._both

    def advance(self, stage: Stage) -> None:
        """Go to a stage: answers under way stay with their drafters. What was seen in another stage does not count."""
        if stage != self.stage:
            self.stage = stage
            self.arms["candidate"].answers.clear()

    def take_back(self, why: str) -> None:
        """The candidate drafts no more answers."""
        log.warning("the drafter that was deployed is taken back: %s", why)
        self.outcome = why

    @property
    def over(self) -> bool:
        """Whether the candidate was taken back, and none of its answers is left."""
        return self.outcome is not None and all(owner is self.present for _, owner in self._ours.values())

    def _of(self, answer: Answer) -> Controller:
        """Whose an answer is: that is decided when it is first seen, by a hash, so that no drafter can choose."""
        entry = self._ours.get(id(answer))
        if entry is not None:
            return entry[1]
        ours = self.outcome is None and (self.stage == "all" or (self.stage == "canary" and self._chosen(answer)))
        controller = self.candidate if ours else self.present
        self._ours[id(answer)] = (answer, controller)
        self._seen[id(answer)] = Counts()
        return controller

    def owner(self, answer: Answer) -> Controller:
        """Who drafts for an answer."""
        return self._of(answer)

    def place(self, answer: Answer) -> Place:
        """Where an answer's beginning is looked for: see above."""
        controller = self._of(answer)
        looked_at = controller is self.present and self._shadowing and self._chosen(answer)
        return Place(controller.root, alone=looked_at)

    def _chosen(self, answer: Answer) -> bool:
        digest = hashlib.blake2b(f"{answer.request} {answer.seed}".encode(), digest_size=4).digest()
        return int.from_bytes(digest) < self.share * (1 << 32)

    def offers(self, eligible: Sequence[Answer], cost: CostModel) -> dict[int, Offer]:
        """Each answer's own controller's."""
        self.present.dearness = self.candidate.dearness = self.dearness
        self._ended.clear()
        offers: dict[int, Offer] = {}
        for name, controller in (("present", self.present), ("candidate", self.candidate)):
            mine = [answer for answer in eligible if self._of(answer) is controller]
            found = controller.offers(mine, cost) if mine else {}
            self._asking[name] = sum(offer.neural for offer in found.values())
            offers |= found
        return offers

    def draft(self, plan: Plan) -> dict[int, Draft]:
        """Each answer's own controller's."""
        drafts: dict[int, Draft] = {}
        for controller in (self.present, self.candidate):
            spans = [span for span in plan.spans if self._of(span.sequence) is controller]
            if spans:
                drafts |= controller.draft(plan._replace(spans=spans))
            controller.trying &= bool(spans)
        self.trying = self.present.trying or self.candidate.trying
        return drafts

    def draft_pass(self, answers: int) -> float:
        """One pass of each drafter that is asked for one."""
        counts = [(self.present, self._asking["present"]), (self.candidate, self._asking["candidate"])]
        return sum(controller.draft_pass(count) for controller, count in counts if count)

    def landed(self, answer: Answer, draft: Draft, held: Sequence[int], *, ended: bool) -> int:
        """A draft was verified."""
        controller = self._ended.get(id(answer)) or self._of(answer)
        tried = controller.landed(answer, draft, held, ended=ended)
        seen = self._seen.get(id(answer))
        if seen is not None and controller.neural is not None and draft.drafter == controller.neural.name:
            seen.add(len(draft), len(held), tried)
        return tried

    @property
    def _shadowing(self) -> bool:
        return self.stage == "shadow" and self.outcome is None

    def _looked_at(self, computed: Sequence[Computed]) -> None:
        if self._shadowing:
            self._shadow.commit([entry for entry in computed if self._chosen(entry.answer)])

    def known(self, answers: Sequence[Answer]) -> None:
        """Tokens of answers have become known: the shadow looks on."""
        if self._shadowing:
            self._shadow.look([answer for answer in answers if self._chosen(answer)])

    def free(self, answer: Answer, *, learn: bool = True) -> None:
        """An answer has ended: that is when drafters are judged."""
        _, controller = self._ours.pop(id(answer), (answer, self.present))
        self._ended[id(answer)] = controller  # its last draft is still to be judged
        seen = self._seen.pop(id(answer), Counts())
        controller.free(answer, learn=learn)
        self._judged += controller is self.candidate and self.stage == "all" and seen.tries[0] > 0
        self.arms["candidate" if controller is self.candidate else "present"].add(seen.tries, seen.hits)
        looked_at = self._shadow.end(answer)  # also of a stage that is over
        if self._shadowing:
            self.arms["candidate"].add(looked_at.tries, looked_at.hits)
        self._decide()

    def _decide(self) -> None:
        """Go on, or back, if there is enough to tell by."""
        old, new = self.arms["present"], self.arms["candidate"]
        if self.outcome is not None or not new.enough or self._judged > REMEMBERED:
            return
        known = old.tau if old.enough else self._before
        least = LEAST_TAU if known is None else known
        if new.lower < least and (known is not None or self._waited_for(new)):
            against = f"{least:g} is asked of it" if known is None else f"the old one's is {known:.2f}"
            self.take_back(f"in stage {self.stage}: tau {new.tau:.2f}, at least {new.lower:.2f}; {against}")
        elif self.auto and self.stage != "all" and (old.enough or self._waited_for(new)):
            self.advance(STAGES[STAGES.index(self.stage) + 1])
            log.info("the drafter that was deployed goes on to stage %s: tau is at least %.2f", self.stage, new.lower)

    def _waited_for(self, new: Arm) -> bool:
        """Whether there is no present drafter to compare with, or one that hardly drafts."""
        return self.present.neural is None or len(new.answers) >= PATIENCE

    def disappointed(self) -> str | None:
        """Of whichever drafts."""
        drafting = self.candidate if self.stage == "all" and self.outcome is None else self.present
        return drafting.disappointed()
