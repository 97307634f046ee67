"""What a plan's rules promise about its size and its seconds, worked out anew from the state and the plan alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.program import BLOCK_SLOTS, StepShape
from slipstream.roofline.cost import CostModel
from slipstream.scheduling import Plan, Sequence, State
from slipstream.scheduling.drafts import SLACK
from slipstream.scheduling.scheduler import ALONE, BEARABLE, LEAST_CHUNK, MOST_STRETCH, STRETCH, SpanPlan

NEARLY = 1 + 1e-9


@dataclass
class Budgets:
    """A plan beside the state it was made for; to be asked before the plan is carried out.

    Its methods raise AssertionError where a promise is broken, and say whether the promise was put to the test: whether
    it kept anything out of the plan.
    """

    state: State
    plan: Plan

    def __post_init__(self) -> None:
        state = self.state
        self.ready = [s for s in state.sequences if s.waits_for is None and s.missing and s.deadline > state.now]
        self.decodes = [span for span in self.plan.spans if span.sequence.blocks and span.sequence.missing == 1]
        self.prompts = [span for span in self.plan.spans if span not in self.decodes]
        self.prompt_rows = sum(span.rows for span in self.prompts)

    def keep(self) -> set[str]:
        """All of them; returns the names of those that were put to the test."""
        self.never_wider_or_more_than_may_be()
        found = {"crowded": self.newcomers_do_not_make_decodes_late(), "least": self.prompts_get_on()}
        if self.state.cost is not None:
            found["priced"] = self.prompts_keep_to_their_seconds(self.state.cost)
            self.nobody_pays_for_anothers_drafts(self.state.cost)
        return {name for name, tested in found.items() if tested}

    def never_wider_or_more_than_may_be(self) -> None:
        """Rows of all kinds together; sequences, unless they were more already (choices of a request come together)."""
        limits = self.state.limits
        assert sum(rows + drafts for _, rows, drafts in self.plan.spans) <= limits.max_rows
        if newcomers := [span for span in self.prompts if not span.sequence.blocks]:
            staying = [s for s in self.ready if s.blocks and s not in self.plan.preempted]
            assert len(staying) + len(newcomers) <= limits.max_sequences

    def prompts_get_on(self) -> bool:
        """A begun prompt that needs no more blocks for it gets a few rows in any step that has room for them."""
        room = self.state.limits.max_rows - len(self.decodes)
        for s in self.ready:
            if s.blocks and s.missing > 1 and s not in self.plan.preempted:
                left = min(s.missing, LEAST_CHUNK, room, len(s.blocks) * BLOCK_SLOTS - s.computed)
                assert self.prompt_rows >= left
        return bool(self.decodes) and self.prompt_rows == LEAST_CHUNK

    def prompts_keep_to_their_seconds(self, cost: CostModel) -> bool:
        """A step with prompts takes no longer than running streams can bear, but for the few rows that go anyway."""
        if not self.prompts:
            return False
        seconds, most = cost.seconds(self.shape([*self.decodes, *self.prompts])), self.bearable(cost)
        assert seconds <= most * NEARLY or self.prompt_rows <= LEAST_CHUNK, (seconds, most, self.prompt_rows)
        last = self.prompts[-1]
        wider = last._replace(rows=last.rows + 1)
        return (
            last.rows < self.missing(last)
            and cost.seconds(self.shape([*self.decodes, *self.prompts[:-1], wider])) > most
        )

    def bearable(self, cost: CostModel) -> float:
        """Seconds that running streams can bear, as they are promised: within a target, or by who waits."""
        if not self.decodes:
            return ALONE
        limits, bare = self.state.limits, cost.seconds(self.shape(self.decodes))
        waiting = [s for s in self.ready if not s.generated and not (s.blocks and s.missing == 1)]
        if limits.tpot_target is not None:
            most = max(limits.tpot_target, bare)
        else:
            most = bare + STRETCH * bare * max(len({s.request for s in waiting}), 1)
            most = min(most, max(BEARABLE, MOST_STRETCH * bare))
        target = limits.ttft_target
        late = target is not None and any(self.state.now - s.arrived > target / 2 for s in waiting)
        return max(most, 2 * bare) if late else most

    def newcomers_do_not_make_decodes_late(self) -> bool:
        """With a target between tokens nobody is let in with whom a step of nothing but decodes would miss it."""
        cost, target = self.state.cost, self.state.limits.tpot_target
        if cost is None or target is None:
            return False
        running = [s for s in self.ready if s.blocks and s not in self.plan.preempted]
        admitted = [span.sequence for span in self.prompts if not span.sequence.blocks]
        if admitted and len(running) + len(admitted) > 1:
            assert cost.seconds(self.decoding([*running, *admitted])) <= target * NEARLY
        queue = [s for s in self.ready if not s.blocks and s not in admitted]
        return bool(running) and any(cost.seconds(self.decoding([*running, *admitted, s])) > target for s in queue)

    def nobody_pays_for_anothers_drafts(self, cost: CostModel) -> None:
        """A step grows for drafts by no more than what whoever gains least gains himself, but for a little slack."""
        drafts = sum(span.drafts for span in self.plan.spans)
        if not drafts:
            return
        gains = [sum(self.state.offers[id(s)].survival[:n]) if n else 0.0 for s, _, n in self.decodes]
        full, bare = self.shape(self.plan.spans), cost.seconds(self.shape(self.decodes))
        grown = cost.extra_rows(full, full.row_context // full.rows)(drafts) + cost.drafted
        assert bare + grown <= (1 + max(SLACK, min(gains))) * bare * NEARLY

    def missing(self, span: SpanPlan) -> int:
        """Tokens of a sequence that have to be computed."""
        return span.sequence.length - self.start(span)

    def start(self, span: SpanPlan) -> int:
        """The first token that has to be computed."""
        s = span.sequence
        return s.computed if s.blocks or s.saved else self.state.peek(s)

    def shape(self, spans: Iterable[SpanPlan]) -> StepShape:
        """A step of some spans, without their drafts."""
        rows = logit_rows = tokens = context = 0
        for span in spans:
            ends = range(self.start(span) + 1, self.start(span) + span.rows + 1)
            rows, tokens, context = rows + len(ends), tokens + ends[-1], context + sum(ends)
            logit_rows += ends[-1] == span.sequence.length
        return StepShape(rows, logit_rows, tokens * self.state.kv_bytes, context)

    def decoding(self, sequences: list[Sequence]) -> StepShape:
        """A step in which sequences decode that are as long as they are now."""
        lengths = [s.length for s in sequences]
        return StepShape(len(lengths), len(lengths), sum(lengths) * self.state.kv_bytes, sum(lengths))
