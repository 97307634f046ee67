"""Nobody waits for ever: one request beside an endless stream that takes all there is, and how long it has to wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from slipstream.kvcache import BlockPool
from slipstream.program import BLOCK_SLOTS, StepShape
from slipstream.roofline.cost import CostModel, Curve
from slipstream.scheduling import Limits, Sequence, State, schedule, scheduler
from slipstream.scheduling.scheduler import AGING, LEAST_CHUNK, blocks_needed
from tests.scheduling.test_scheduler import sequence

STEP = 0.25
"""Seconds of a step."""
BLOCKS, SLOTS, QUEUE = 24, 4, 30
"""Of the cache, how many run at once, how many of the stream wait at most."""
PROMPT, ANSWER, LARGE = 40, 4, BLOCK_SLOTS * (BLOCKS - 2)
"""Tokens of a prompt, of every answer, and of a prompt that takes nearly all of the cache: the stream's requests arrive
faster than they are answered.
"""

TIGHT = CostModel(Curve((1, 512), (1.0, 512.0)), Curve((1, 512), (0.1, 0.2)), (0.0, 0.0, 0.0, 0.0))
"""A row more takes as long again as the first one."""


@dataclass
class Busy:
    """A server under a stream: two more of `stream` with every step, as far as the queue has room."""

    stream: Callable[[int, float], Sequence]
    limits: Limits
    cost: CostModel | None = None
    pool: BlockPool = field(default_factory=lambda: BlockPool(BLOCKS))
    sequences: list[Sequence] = field(default_factory=list)
    served: dict[str, float] = field(default_factory=dict)
    now: float = 0.0
    arrived: int = 0
    together: int = 0
    """The most that ran at once."""

    def add(self, s: Sequence) -> None:
        """As the engine does: who was away has had as much as who has had least of those there."""
        least = min((self.served[other.tenant] for other in self.sequences), default=0.0)
        self.served[s.tenant] = max(self.served.get(s.tenant, 0.0), least)
        self.sequences.append(s)

    def step(self) -> None:
        self.now += STEP
        for _ in range(2):
            if len(self.sequences) < QUEUE + SLOTS:
                self.arrived += 1
                self.add(self.stream(self.arrived, self.now))
        plan = schedule(State(self.now, self.sequences, self.pool, self.limits, self.served, self.cost))
        assert not plan.too_large
        for s in plan.preempted:
            self.pool.release(s.blocks)
            s.blocks, s.computed = [], 0
        for s, rows, _ in plan.spans:
            s.blocks += self.pool.take(blocks_needed(s, s.computed + rows))
            s.computed += rows
            self.served[s.tenant] += rows
            self.together = max(self.together, sum(1 for other in self.sequences if other.blocks))
            if not s.missing:
                s.append(1)
                if s.generated == ANSWER:
                    self.sequences.remove(s)
                    self.pool.release(s.blocks)

    def waits(self, waiter: Sequence, at_most: float) -> float:
        """Seconds until the waiter's answer is complete; it comes when the stream has filled the queue."""
        while len(self.sequences) < QUEUE:
            self.step()
        waiter.arrived = self.now
        self.add(waiter)
        while waiter in self.sequences and self.now - waiter.arrived <= at_most:
            self.step()
        return self.now - waiter.arrived


def short(tenant: str = "stream", priority: int = 0, prompt: int = PROMPT) -> Callable[[int, float], Sequence]:
    """A stream of one tenant; with "" each request is of a tenant of its own."""
    return lambda number, now: sequence(
        number, prompt, tenant=tenant or f"tenant {number}", priority=priority, arrived=now
    )


def one(prompt: int = PROMPT, priority: int = 0) -> Sequence:
    return sequence(0, prompt, tenant="one", priority=priority)


CASES = {
    "the same tenant's": (short("one"), one, 0),
    "large among small": (short("one"), partial(one, LARGE), 0),
    "large among small, of other tenants": (short(""), partial(one, LARGE), 0),
    "higher priority": (short(priority=-1), partial(one, priority=1), 2),
    "higher priority, the same tenant's": (short("one", priority=-1), partial(one, priority=1), 2),
    "higher priority, of ever new tenants": (short("", priority=-1), partial(one, priority=1), 2),
    "large, and of lower priority": (short("one", priority=-1), partial(one, LARGE, priority=1), 2),
}


def bound(rows: int, sequences: int, behind: int) -> float:
    """Seconds of aging, and of serving all that may be there when it has aged, by rows and by places."""
    work = (QUEUE + SLOTS) * (PROMPT + ANSWER) + LARGE
    return behind * AGING + STEP * (work / rows + (QUEUE + SLOTS) * (ANSWER + 1) / sequences)


@pytest.mark.parametrize("rows", [64, SLOTS], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", CASES)
def test_nobody_waits_for_ever(name: str, rows: int) -> None:
    stream, waiter, behind = CASES[name]
    most = bound(rows, SLOTS, behind)
    assert Busy(stream, Limits(rows, SLOTS)).waits(waiter(), most) <= most


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_nobody_waits_for_ever_on_a_target(name: str, places: int) -> None:
    """The target between tokens is what keeps newcomers waiting: it lets `places` decode at once, if that many."""
    stream, waiter, behind = CASES[name]
    target = TIGHT.seconds(StepShape(places, places, 0, 0)) * (1.01 if places > 1 else 0.5)
    most = bound(LEAST_CHUNK, places, behind)
    busy = Busy(stream, Limits(64, 100, tpot_target=target, ttft_target=1.0), TIGHT)
    assert busy.waits(waiter(), most) <= most
    assert busy.together == places, "they came one by one"


@pytest.mark.parametrize("prompt", [PROMPT, BLOCK_SLOTS - 1], ids=["", "each grows out of its block"])
def test_who_decodes_gets_on_as_well(prompt: int) -> None:
    """More run than a step has rows, all of them more urgent; the cache is full."""
    busy = Busy(short(priority=-1, prompt=prompt), Limits(SLOTS, 100))
    most = bound(SLOTS, 100, behind=2)
    assert busy.waits(one(PROMPT, priority=1), most) <= most


def test_without_aging_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is one under which somebody could wait for ever."""
    monkeypatch.setattr(scheduler, "AGING", math.inf)
    assert Busy(short(priority=-1), Limits(64, SLOTS)).waits(one(priority=1), 1000.0) > 1000.0
