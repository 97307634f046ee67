"""Drafting: the engine's side of speculation. Offers before a plan, drafts after it, verdicts when a step landed."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from slipstream.engine.flight import Flight
from slipstream.engine.holdings import Holdings
from slipstream.program import Draft
from slipstream.roofline.cost import CostModel
from slipstream.scheduling import Offer, Plan, Sequence
from slipstream.speculation import Computed, Controller, Drafter, ExactVerification, Verdict, Verification

Float32Array = npt.NDArray[np.float32]

log = logging.getLogger(__name__)

LISTEN_EVERY = 8
"""Where steps are planned ahead and nothing was drafted lately, every so many steps wait until drafts could be made."""
PATIENCE = 8
"""Looks in a row that brought no drafts, after which answers are looked at every other step, and many side by side less
often: looking takes time for each, and the more there are the less a draft can bring.
"""


class Drafting:
    """What an engine does about drafts; without a controller, nothing."""

    def __init__(
        self,
        controller: Controller | None,
        verification: Verification | None,
        holdings: Holdings,
        vocabulary: int,
    ):
        self.controller, self._vocabulary = controller, vocabulary
        self._verification = verification or ExactVerification()
        self._holdings = holdings
        self._quiet = self._vain = self._unseen = self._asleep = 0
        self._offered = False
        self.resting = False
        """Whether nothing is drafted for now, and nothing learned."""

    @property
    def wants_logits(self) -> bool:
        """Whether steps with drafts must hand out logits."""
        return self._verification.wants_logits

    def unforeseen(self, flight: Flight) -> bool:
        """Whether what comes after a step may be planned before its tokens are known: drafts can only be made then."""
        if flight.drafts or any(s.needs_history for s in flight.drawing):
            return False
        return self.controller is None or self._quiet % LISTEN_EVERY != 0

    def place(self, sequence: Sequence) -> None:
        """Say where the beginning of a new sequence is looked for."""
        if self.controller is not None:
            root, sequence.alone = self.controller.place(sequence)
            if root:
                sequence.namespace = replace(sequence.namespace, adapter=root)

    def offers(
        self, sequences: SequenceOf[Sequence], cost: CostModel | None, under_way: bool, steady: bool = False
    ) -> tuple[Mapping[int, Offer], float]:
        """What drafting would bring the sequences that decode next, and what a pass of the drafter takes.

        Nothing is offered while a step is `under_way`: its tokens are not known. `steady`: they are the sequences of
        the last step, a token further.
        """
        self._offered = False
        self._unseen += 1
        self._asleep = self._asleep - 1 if steady else 0
        if self._asleep > 0:
            return {}, 0.0
        if self.controller is None or self.resting or cost is None or under_way:
            self._quiet += self._quiet > 0
            return {}, 0.0
        eligible = [s for s in sequences if s.blocks and not s.unknown and s.missing == 1 and s.waits_for is None]
        eligible = [s for s in eligible if s.constraint is None or s.constraint.draftable]
        if not eligible:
            return {}, 0.0
        if self._vain >= PATIENCE and self._unseen < min(max(len(eligible) // 2, 2), LISTEN_EVERY):
            return {}, 0.0
        self._unseen = 0
        self._vain += 1
        offers = self.controller.offers(eligible, cost)
        self._asleep = self.controller.asleep
        self._offered = bool(offers)
        self._quiet = 0 if offers else self._quiet + 1
        neural = sum(offer.neural for offer in offers.values()) if offers else 0
        return offers, self.controller.draft_pass(neural) if neural else 0.0

    def drafts(self, plan: Plan) -> tuple[dict[int, Draft], float]:
        """The drafts that a plan has room for, by id of the sequence, and the seconds that making them took.

        The controller hears of it too where none of what it offered was wanted.
        """
        if self.controller is None or not self._offered:
            return {}, 0.0
        begun = time.perf_counter()
        drafts = self.controller.draft(plan)
        self._vain = 0 if drafts else self._vain
        if any(not self._exist(draft) for draft in drafts.values()):
            log.warning("a drafter proposed tokens that the model does not have, or no distribution; they are left out")
            drafts = {key: draft for key, draft in drafts.items() if self._exist(draft)}
        return drafts, time.perf_counter() - begun

    def _exist(self, draft: Draft) -> bool:
        proposals = draft.proposals if self.wants_logits else None  # nobody else looks at them
        return (
            min(draft.tokens) >= 0
            and max(draft.tokens) < self._vocabulary
            and all(proposal.possible(self._vocabulary) for proposal in proposals or ())
        )

    def scratch(self, drafts: int) -> int:
        """Slots beyond those of the drafts that making them may take."""
        return max(self._neural.scratch(drafts) - drafts, 0) if drafts and self._neural is not None else 0

    def verify(self, flight: Flight, sequence: Sequence, draft: Draft, first: int, drawn: list[int]) -> Verdict:
        """Judge a draft, and move the accepted branch of a tree to where a chain would be."""
        assert flight.output is not None
        count, logits = 1 + len(draft), flight.output.logits
        rows = logits[first : first + count] if logits is not None else None
        verdict = self._verification.verify(sequence, draft, drawn[first : first + count], rows)
        end = sequence.computed
        self._holdings.move(
            [(sequence.slot(end + i), sequence.slot(end + k)) for k, i in enumerate(verdict.held) if i != k]
        )
        if self._neural is not None:
            leg = next(index for index, leg in enumerate(flight.spans) if leg.sequence is sequence)
            self._neural.commit([_computed(flight, leg, verdict.held, self._taps(flight))])
        return verdict

    def landed(self, sequence: Sequence, draft: Draft, held: SequenceOf[int], *, ended: bool) -> int:
        """A draft was verified; returns how many of its positions were tried."""
        assert self.controller is not None
        return self.controller.landed(sequence, draft, held, ended=ended)

    def computed(self, flight: Flight) -> None:
        """Tell the drafter what a step has computed for good, drafts left out: those are judged one by one."""
        if self._neural is not None:
            taps = self._taps(flight)
            going = [
                _computed(flight, index, (), taps)
                for index, (sequence, _, _, draft) in enumerate(flight.spans)
                if draft is None and sequence.blocks and not sequence.ended
            ]
            self._neural.commit(going)

    def _taps(self, flight: Flight) -> Float32Array | None:
        """The hidden states that the drafter needs, of all rows of a step [rows, width of all taps]."""
        assert self._neural is not None
        assert flight.output is not None
        layers = self._neural.needs.taps
        return flight.output.joined([f"layer.{n}" for n in layers]) if layers else None

    def step_landed(self, flight: Flight) -> None:
        """All of a step's tokens are known: keep the pace."""
        if self.controller is not None and not self.resting:
            self.controller.known(flight.drawing)
        if self.controller is None or not flight.drafts:
            return
        forecast, decodes = flight.forecast, max(len(flight.drawing), 1)
        if len(flight.rows) != decodes + sum(map(len, flight.drafts.values())):  # prompts share it
            return
        plain = forecast.plain * sum(flight.tokens) / decodes
        spent = time.perf_counter() - flight.begun
        tags = {id(sequence): sequence.tag for sequence in flight.drawing}
        drafted = [(draft.drafter, tags[key]) for key, draft in flight.drafts.items() if key in tags]
        self.controller.paced(drafted, spent, plain, forecast.speedup)
        self.controller.verified(spent - forecast.drafting - forecast.plain, forecast.extra)

    @property
    def _neural(self) -> Drafter | None:
        return self.controller.neural if self.controller is not None else None

    def free(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        if self.controller is not None:
            self.controller.free(sequence, learn=not self.resting)


def _computed(flight: Flight, index: int, held: SequenceOf[int], taps: Float32Array | None) -> Computed:
    """What a leg has computed that will stay: its rows, and the drafts that hold."""
    sequence, start, rows, _ = flight.spans[index]
    start += flight.repeats
    if taps is None:
        return Computed(sequence, start, rows + len(held))
    first = sum(leg.rows + len(leg.draft or ()) for leg in flight.spans[:index])
    end = first + rows
    if held and held[-1] >= len(held):  # a branch of a tree: others lie between
        return Computed(sequence, start, rows + len(held), taps[[*range(first, end), *(end + i for i in held)]])
    return Computed(sequence, start, rows + len(held), taps[first : end + len(held)])
