"""Which rows the next step computes: a pure function from the state to a plan.

Decodes come first. Prompts ride along as far as their rows' marginal cost keeps the step within what running streams
can bear; a prompt that comes in is admitted when the cache holds all of it. Who waits is decided by priority (which
rises with waiting), then by how much each tenant has had, then by arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from slipstream.kvcache import BlockPool
from slipstream.program import BLOCK_SLOTS, StepShape
from slipstream.roofline.cost import CostModel
from slipstream.scheduling.drafts import Offer, Prices, allot
from slipstream.scheduling.sequence import Sequence

STRETCH = 0.5
"""A step may take this much longer for everyone who waits for a first token, unless a latency target says otherwise:
who runs and who waits count alike.
"""
ALONE = 0.25
"""Seconds of a step while nobody decodes: how long a newcomer, or a cancellation, may have to wait."""
BEARABLE, MOST_STRETCH = 0.05, 2.0
"""Seconds of a step that nobody who reads an answer minds, and times a step without prompts: stretching ends at the
longer of the two, however many wait.
"""
LEAST_CHUNK = 2
"""Prompt rows that a step takes in any case, all prompts together, so that they get on."""
AGING = 10.0
"""Seconds of waiting that are worth one step of priority."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What plans must keep to. Targets are seconds; None: no target."""

    max_rows: int
    max_sequences: int = 1 << 30
    tpot_target: float | None = None
    ttft_target: float | None = None


@dataclass(frozen=True, slots=True)
class State:
    """Everything a plan depends on: values only, and sequences that planning does not change.

    `sequences` are in order of arrival; `served` are the rows each tenant has had; `cost` prices steps, and without it
    only `limits.max_rows` bounds them. `kv_bytes` are those of a token in the cache; `peek` looks up how many tokens of
    a sequence that holds no blocks the prefix cache knows; `spare` blocks are free for what is moved out of the cache.
    `offers` are what drafting is expected to bring, by id of the sequence, `draft_pass` the seconds of a pass of the
    drafter, and `dearness` how much more verifying drafts lately cost than `cost` says.
    """

    now: float
    sequences: SequenceOf[Sequence]
    pool: BlockPool
    limits: Limits
    served: Mapping[str, float] = field(default_factory=dict)
    cost: CostModel | None = None
    kv_bytes: int = 0
    peek: Callable[[Sequence], int] = lambda sequence: 0
    spare: int = 0
    offers: Mapping[int, Offer] = field(default_factory=dict)
    draft_pass: float = 0.0
    dearness: float = 1.0


class SpanPlan(NamedTuple):
    """`rows` tokens of a sequence, from its first one that is neither computed nor in the prefix cache.

    One that was moved out of the cache is moved back before. `drafts` more rows are draft tokens, if there are any by
    then.
    """

    sequence: Sequence
    rows: int
    drafts: int = 0


class Plan(NamedTuple):
    """A step's spans, the sequences that lose their blocks for it, those that can never fit, and those too late.

    Of the preempted, those in `saved` are moved out of the cache, the others computed again. `row_price` is how likely
    a draft must be to survive to be worth its row, `draft_price` to be worth the pass of the drafter as well; `plain`
    are the seconds that the decodes would take alone and without drafts, `speedup` what the drafts are expected to
    bring, `extra` the seconds that verifying them adds by the cost model.
    """

    spans: list[SpanPlan]
    preempted: list[Sequence]
    saved: list[Sequence]
    too_large: list[Sequence]
    expired: list[Sequence]
    row_price: float = 0.0
    draft_price: float = 0.0
    plain: float = 0.0
    speedup: float = 1.0
    extra: float = 0.0


def blocks_needed(sequence: Sequence, tokens: int) -> int:
    """Blocks the sequence lacks for its first `tokens` tokens."""
    return max(0, -(-tokens // BLOCK_SLOTS) - len(sequence.blocks))


def schedule(state: State) -> Plan:
    """Plan a step; whoever runs it takes the blocks and gives back those of the preempted."""
    return _Planner(state).plan()


class _Planner:
    def __init__(self, state: State):
        self.state = state
        self.available = state.pool.available
        self.spans: list[SpanPlan] = []
        self.preempted: list[Sequence] = []
        self.saved: list[Sequence] = []
        self.spare = state.spare
        self.too_large: list[Sequence] = []
        self.planned: set[int] = set()
        self.starts: dict[int, int] = {}
        self.first = 0
        self.rows = self.logit_rows = self.context = self.kv_tokens = 0

    def plan(self) -> Plan:
        state = self.state
        expired: list[Sequence] = []
        ready: list[Sequence] = []
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in state.sequences:
            if sequence.deadline <= state.now:
                expired.append(sequence)
            elif sequence.waits_for is None and (missing := sequence.missing) and sequence.may_go_on:
                ready.append(sequence)
                (decodes if missing == 1 and sequence.blocks else prompts).append(sequence)
        if len(ready) > 1:
            self.first = min(s.priority for s in ready)
            decodes.sort(key=self._urgency)
            prompts.sort(key=self._order)
        for sequence in decodes:
            if self.rows == state.limits.max_rows:
                break
            if sequence not in self.preempted and self._find_blocks(sequence, ready):
                self._add_decode(sequence)
        bare = self._shape()
        if prompts:
            self._add_prompts(prompts, ready)
        prices = self._add_drafts(bare) if state.offers and bare.rows else ()
        return Plan(self.spans, self.preempted, self.saved, self.too_large, expired, *prices)

    def _add_drafts(self, bare: StepShape) -> tuple[float, ...]:
        """Let drafts ride along where they pay; returns the plan's last five entries.

        Prompts in the step make rows dearer, but their own seconds are not held against the drafts.
        """
        state, cost = self.state, self.state.cost
        places = [i for i, span in enumerate(self.spans) if id(span.sequence) in state.offers and span.rows == 1]
        if not places or cost is None:
            return ()
        offers = [self._within(self.spans[i].sequence, state.offers[id(self.spans[i].sequence)]) for i in places]
        full, context = self._shape(), self.context // max(self.rows, 1)

        without, extra_rows = cost.seconds(full), cost.extra_rows(full, context)

        def step(drafts: int) -> float:
            return without + (state.dearness * (extra_rows(drafts) + cost.drafted) if drafts else 0.0)

        sunk = without - cost.seconds(bare)
        room = state.limits.max_rows - self.rows
        chosen = allot(offers, Prices(step, sunk, state.draft_pass), bare.rows, room)
        for place, drafts in zip(places, chosen.drafts, strict=True):
            self.spans[place] = SpanPlan(self.spans[place].sequence, 1, drafts)
        neural = sum(1 for offer, drafts in zip(offers, chosen.drafts, strict=True) if offer.neural and drafts)
        each = state.draft_pass / neural if neural else 0.0
        row = chosen.rate * (step(2) - step(1))  # the first one alone bears what all drafts cost the host
        extra = (step(sum(chosen.drafts)) - without) / state.dearness
        return row, row + chosen.rate * each, cost.seconds(bare), chosen.speedup, extra

    def _within(self, sequence: Sequence, offer: Offer) -> Offer:
        """No drafts past the last token that a sequence may have, or past the blocks that it may."""
        most = self._affordable_drafts(sequence, min(len(offer.survival), sequence.limit - sequence.length - 1))
        return offer if len(offer.survival) <= most else replace(offer, survival=offer.survival[:most])

    def _affordable_drafts(self, sequence: Sequence, drafts: int) -> int:
        """Drafts for which there are blocks; nobody gives way for them. Puts the blocks by, before drafts are chosen:
        if some were left out later, others might pay for what is left.
        """
        held = max(len(sequence.blocks), -(-(sequence.computed + 1) // BLOCK_SLOTS))
        spare = max(0, self.available - len(self.spans))  # everybody who runs may need a block for the next step
        drafts = max(0, min(drafts, (held + spare) * BLOCK_SLOTS - sequence.computed - 1))
        self.available -= max(0, -(-(sequence.computed + 1 + drafts) // BLOCK_SLOTS) - held)
        return drafts

    def _start(self, sequence: Sequence) -> int:
        """The first token that has to be computed."""
        if sequence.blocks or sequence.saved:
            return sequence.computed
        if id(sequence) not in self.starts:
            self.starts[id(sequence)] = self.state.peek(sequence)
        return self.starts[id(sequence)]

    def _urgency(self, s: Sequence) -> tuple[float, float]:
        """Who goes first, and who is preempted last."""
        return s.priority - (self.state.now - s.arrived) / AGING, s.arrived

    def _order(self, s: Sequence) -> tuple[bool, float, float, float]:
        """Prompts that are begun, then by priority, then those whose tenant has had least.

        Waiting lifts a sequence to the most urgent who waits, not above: a tenant's long queue does not grow urgent.
        """
        lifted = max(s.priority - math.floor((self.state.now - s.arrived) / AGING), self.first)
        return not s.blocks, lifted, self.state.served.get(s.tenant, 0.0), s.arrived

    def _add(self, sequence: Sequence, rows: int) -> None:
        start = self._start(sequence)
        end = start + rows
        self.available -= blocks_needed(sequence, end)
        self.spans.append(SpanPlan(sequence, rows))
        self.planned.add(id(sequence))
        self.rows += rows
        self.logit_rows += end == sequence.length
        self.context += (end * (end + 1) - start * (start + 1)) // 2
        self.kv_tokens += end

    def _add_decode(self, sequence: Sequence) -> None:
        """The same as `_add` with a row, for a sequence that lacks only that one."""
        end = sequence.computed + 1
        self.available -= blocks_needed(sequence, end)
        self.spans.append(SpanPlan(sequence, 1))
        self.planned.add(id(sequence))
        self.rows += 1
        self.logit_rows += 1
        self.context += end
        self.kv_tokens += end

    def _find_blocks(self, sequence: Sequence, ready: list[Sequence]) -> bool:
        """Make room for a decode: the least urgent that runs gives way, the sequence itself if it is that one."""
        needed = blocks_needed(sequence, sequence.computed + 1)
        if not needed:
            return True
        if -(-(sequence.computed + 1) // BLOCK_SLOTS) > self.state.pool.size:
            self.too_large.append(sequence)
            return False
        if self.available < needed and any(s.blocks and not s.may_go_on for s in self.state.sequences):
            return False  # one that is about to end gives its blocks back: wait for that
        while self.available < needed:
            victims = [s for s in ready if s.blocks and id(s) not in self.planned and s not in self.preempted]
            victim = max(victims, key=self._urgency)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.preempted.append(victim)
        self.available += self.state.pool.releasable(victim.blocks)
        if len(victim.blocks) <= self.spare and self._saving_pays(victim):
            self.saved.append(victim)
            self.spare -= len(victim.blocks)

    def _saving_pays(self, victim: Sequence) -> bool:
        """Whether moving what a sequence has in the cache out and back takes less time than computing it again.

        Cached blocks that others hold as well stay, and need not be computed. Those that it holds alone may be given up
        before it is back: they are not counted on.
        """
        cost, tokens = self.state.cost, victim.computed
        if cost is None:
            return False
        moved = 2 * len(victim.blocks) * BLOCK_SLOTS * self.state.kv_bytes
        shared = len(victim.blocks) - self.state.pool.releasable(victim.blocks)
        stay = BLOCK_SLOTS * min(shared, victim.node.depth if victim.node is not None else 0)
        pairs = (tokens * (tokens + 1) - stay * (stay + 1)) // 2
        again = StepShape(tokens - stay, 0, tokens * self.state.kv_bytes, pairs)
        return cost.copy * moved < cost.seconds(again)

    def _add_prompts(self, prompts: list[Sequence], ready: list[Sequence]) -> None:
        limits = self.state.limits
        limit, decodes = self._step_seconds(prompts), self.rows
        running = sum(1 for s in ready if s.blocks and s not in self.preempted)
        for sequence in prompts:
            left = limits.max_rows - self.rows
            if left <= 0:
                return
            if sequence in self.preempted:
                continue
            if not sequence.blocks and (self.preempted or running >= limits.max_sequences):
                return
            if not sequence.blocks and running and self._crowded(sequence, running + 1):
                return
            if -(-sequence.length // BLOCK_SLOTS) > self.state.pool.size:
                self.too_large.append(sequence)
                continue
            rows = min(sequence.length - self._start(sequence), left)
            if limit is not None:
                least = max(0, LEAST_CHUNK - (self.rows - decodes))
                rows = min(rows, max(self._affordable(sequence, rows, limit), least))
            if rows <= 0:
                return
            if sequence.blocks:
                rows = self._fitting(sequence, rows, ready)
                if not rows:
                    continue
            else:
                # Admitted only with room for all of it, and for a block more of everyone who runs.
                spare = running if self.spans else 0
                if blocks_needed(sequence, sequence.length) + spare > self.available:
                    return
                running += 1
            self._add(sequence, rows)

    def _crowded(self, newcomer: Sequence, sequences: int) -> bool:
        """Whether a step of nothing but decodes would miss the target for the time between tokens with one more."""
        cost, target = self.state.cost, self.state.limits.tpot_target
        if cost is None or target is None:
            return False
        tokens, context = self.kv_tokens + newcomer.length, self.context + newcomer.length
        return cost.seconds(StepShape(sequences, sequences, tokens * self.state.kv_bytes, context)) > target

    def _fitting(self, sequence: Sequence, rows: int, ready: list[Sequence]) -> int:
        """Rows of a begun prompt that the cache has room for; if none, and nothing else runs, others give way."""
        room = self.available * BLOCK_SLOTS + len(sequence.blocks) * BLOCK_SLOTS - sequence.computed
        if room > 0 or self.spans:
            return max(0, min(rows, room))
        others = [s for s in ready if s.blocks and s is not sequence and s not in self.preempted]
        if others:
            self._preempt(max(others, key=self._urgency))
            return self._fitting(sequence, rows, ready)
        return 0

    def _shape(self, sequence: Sequence | None = None, rows: int = 0) -> StepShape:
        """The step so far, and some more rows of a sequence."""
        context, tokens, logits = self.context, self.kv_tokens, self.logit_rows
        if sequence is not None:
            start = self._start(sequence)
            end = start + rows
            context += (end * (end + 1) - start * (start + 1)) // 2
            tokens += end
            logits += end == sequence.length
        return StepShape(self.rows + rows, logits, tokens * self.state.kv_bytes, context)

    def _step_seconds(self, prompts: list[Sequence]) -> float | None:
        """How long the step may take with prompts in it; None: there is nothing to price it with."""
        cost, limits = self.state.cost, self.state.limits
        if cost is None:
            return None
        if not self.rows:
            return ALONE
        bare = cost.seconds(self._shape())
        waiting = len({s.request for s in prompts if not s.generated}) or 1
        stretched = min(bare * (1.0 + STRETCH * waiting), max(BEARABLE, MOST_STRETCH * bare))
        limit = max(limits.tpot_target or stretched, bare)
        if limits.ttft_target is not None:
            late = any(self.state.now - s.arrived > limits.ttft_target / 2 for s in prompts if not s.generated)
            limit = max(limit, 2 * bare) if late else limit
        return limit

    def _affordable(self, sequence: Sequence, rows: int, limit: float) -> int:
        """The most rows of a prompt that keep the step within `limit`."""
        cost = self.state.cost
        assert cost is not None
        if cost.seconds(self._shape(sequence, rows)) <= limit:
            return rows
        low, high = 0, rows
        while high - low > 1:
            middle = (low + high) // 2
            if cost.seconds(self._shape(sequence, middle)) <= limit:
                low = middle
            else:
                high = middle
        return low
