"""A seeded simulation of traffic: arrivals, shared beginnings, several choices, drafts, cancellations, tiny pools.

Every plan keeps what its rules promise (`promises`), with targets of each seed's own. The scheduler plans, the engine's
own block keeping takes and gives back; only the kernels are missing. A seed that fails fails again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest

from slipstream.engine.holdings import Holdings
from slipstream.program import BLOCK_SLOTS, StepShape
from slipstream.scheduling import Limits, Offer, Plan, Sequence, State, schedule, scheduler
from tests.scheduling.promises import Budgets
from tests.scheduling.test_scheduler import COST, sequence

# The usual; moving blocks costs; all slower; long contexts cost.
COSTS = (
    COST, replace(COST, copy=1e-3), replace(COST, pace=8.0), replace(COST, attention=(0.0, 0.0, 1e-6, 1e-9)),
)  # fmt: skip


class Memory:
    """Stands for an executable: what lies in which slot is not asked for, only that copies stay within the cache."""

    def __init__(self, blocks: int):
        self.blocks = blocks

    def copy_blocks(self, pairs: np.ndarray) -> None:
        assert pairs.size == 0 or (pairs.min() >= 0 and pairs.max() < self.blocks)


@dataclass
class Simulation:
    """Traffic of one seed; `met` counts what it came across."""

    seed: int
    met: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        self.rng = rng = random.Random(self.seed)
        blocks, spare = rng.randint(4, 24), rng.choice([0, 3, 20, 20])
        cost = rng.choice([None, *COSTS])
        plain = (cost or COST).seconds(StepShape(1, 1, 0, 0))
        tpot, ttft = rng.choice([None, rng.uniform(0.7, 4) * plain]), rng.choice([None, rng.uniform(0.05, 2.0)])
        limits = Limits(rng.choice([4, 16, 64]), rng.choice([1, 3, 100]), tpot, ttft)
        self.held = held = Holdings(Memory(blocks + spare), blocks, spare, cost, 1000)  # type: ignore[arg-type]
        if rng.random() < 0.2:
            held.prefix = None
        self.stems = [[rng.randrange(9) for _ in range(rng.randint(20, BLOCK_SLOTS * blocks))] for _ in range(3)]
        self.longest_prompt = rng.choice([BLOCK_SLOTS * blocks + 20, 40, 40])
        self.longest_answer = rng.choice([40, 150])
        self.sequences: list[Sequence] = []
        self.left: dict[int, int] = {}
        served: dict[str, float] = dict.fromkeys("abc", 0.0)
        arrivals, crowd, now, number, idle = rng.randint(1, 12), rng.choice([1, 1, 6]), 0.0, 0, 0
        while arrivals or self.sequences:
            now += 0.01
            for _ in range(min(arrivals, rng.randint(1, crowd)) if rng.random() < 0.4 else 0):
                arrivals -= 1
                self.arrive(number, now)
                number += 1
            if self.sequences and rng.random() < 0.02:
                self.end(rng.choice(self.sequences))
            offers = self.offers() if cost is not None else {}
            state = State(
                now, self.sequences, held.pool, limits, served, cost, 1000, held.peek, held.spare.free, offers, 1e-4
            )
            before = self.seen()
            plan = schedule(state)
            assert self.seen() == before, "planning changes nothing"
            assert schedule(state) == plan
            for what in Budgets(state, plan).keep():
                self.note(what, 1)
            self.apply(plan, served)
            held.check(self.sequences)
            moved = plan.spans or plan.too_large or plan.expired or not self.sequences
            idle = 0 if moved else idle + 1
            assert idle < 3, "nothing runs, and nothing ends"
        if held.prefix is not None:
            held.prefix.clear()
        assert held.pool.free == held.pool.size
        assert held.spare.free == held.spare.size

    def arrive(self, number: int, now: float) -> None:
        rng = self.rng
        most = self.longest_prompt
        stem = rng.choice(self.stems)[: rng.randint(1, most)] if rng.random() < 0.6 else []
        prompt = (stem + [rng.randrange(9) for _ in range(rng.randint(0 if stem else 1, most - len(stem) or 1))])[:most]
        if rng.random() < 0.3:  # all but its last token may be known
            prompt = prompt[: (len(prompt) - 1) // BLOCK_SLOTS * BLOCK_SLOTS + 1]
        first: Sequence | None = None
        choices = rng.choice([1, 1, 1, 3])
        limit = len(prompt) + (rng.randint(1, self.longest_answer) if rng.random() < 0.5 else 1 << 20)
        tenant, priority = rng.choice("abc"), rng.choice([0, 0, 2])
        deadline = now + rng.choice([1e9, 1e9, 2.0])
        for choice in range(choices):
            s = sequence(number, len(prompt), tenant=tenant, priority=priority, arrived=now, deadline=deadline)
            s.tokens, s.choice, s.limit, s.waits_for = list(prompt), choice, limit, first
            first = first or s
            self.sequences.append(s)
            self.left[id(s)] = rng.randint(1, self.longest_answer)

    def offers(self) -> dict[int, Offer]:
        """Something to be drafted for some that decode."""
        rng, offers = self.rng, {}
        for s in self.sequences:
            if s.blocks and s.missing == 1 and rng.random() < 0.5:
                chance, most = rng.random(), rng.randint(1, 8)
                survival = tuple(chance ** (1 + depth) for depth in range(most))
                offers[id(s)] = Offer(survival, rng.random() < 0.5, rng.choice([0, 0, 1]), rng.choice([0.0, 1e-3]))
        return offers

    def seen(self) -> Any:
        """All that a plan may depend on."""

        def plain(s: Sequence) -> dict[str, Any]:
            names = {f.name for f in fields(s)} - {"node", "waits_for"}
            return {name: copy.copy(getattr(s, name)) for name in names}

        prefix = self.held.prefix
        return [plain(s) for s in self.sequences], self.held.pool.available, prefix and sorted(prefix.blocks())

    def apply(self, plan: Plan, served: dict[str, float]) -> None:
        held = self.held
        assert len({id(s) for s, _, _ in plan.spans}) == len(plan.spans)
        for s in (*plan.too_large, *plan.expired):
            self.end(s)
        assert all(s in plan.preempted for s in plan.saved)
        for s in plan.preempted:
            assert s not in [span.sequence for span in plan.spans]
            held.preempt(s, save=s in plan.saved)
            self.note("preempted", 1)
            self.note("saved", s in plan.saved)
        for s, rows, drafts in plan.spans:
            assert not drafts or rows == 1
            fresh = not s.blocks and not s.saved
            held.take(s, rows + drafts)
            self.note("prefix", fresh and s.computed > 0)
            assert 1 <= rows <= s.missing
            assert s.length + drafts < s.limit or not drafts, "no drafts past the last token"
            self.note("drafts", drafts)
        for s, rows, _ in plan.spans:
            s.computed += rows
            served[s.tenant] += rows
            held.remember(s)
        for s, _, drafts in plan.spans:
            if s.computed == len(s.tokens):
                self.draw(s, drafts)

    def draw(self, s: Sequence, drafts: int) -> None:
        """The drafts that hold, and a token more; the answer may end at any of them."""
        if not s.generated and s.choice == 0:
            waiting = [other for other in self.sequences if other.waits_for is s]
            self.held.fork(s, waiting)
            self.note("forked", len([other for other in waiting if other.blocks]))
        held = self.rng.randint(0, drafts)
        for place in range(held + 1):
            s.computed += place < held
            s.append(self.rng.randrange(9))
            self.left[id(s)] -= 1
            if not self.left[id(s)] or s.length >= s.limit:
                s.computed = min(s.computed, len(s.tokens))
                self.end(s)
                return
        self.held.remember(s)

    def end(self, s: Sequence) -> None:
        self.sequences.remove(s)
        self.held.release(s)
        for other in self.sequences:
            if other.waits_for is s:
                other.waits_for = None

    def note(self, what: str, count: int) -> None:
        self.met[what] = self.met.get(what, 0) + count


def simulate(seeds: Iterable[int]) -> dict[str, int]:
    met: dict[str, int] = {}
    for seed in seeds:
        simulation = Simulation(seed)
        try:
            simulation.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        for what, count in simulation.met.items():
            met[what] = met.get(what, 0) + count
    return met


COMMON = ("preempted", "prefix", "drafts", "forked", "priced", "least")


@pytest.mark.parametrize("block", range(10))
def test_simulation(block: int) -> None:
    met = simulate(range(block * 40, block * 40 + 40))
    assert all(met.get(what) for what in COMMON), "it comes across everything"
    assert block != 1 or (met["saved"] and met["crowded"])


def test_a_seed_fails_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a seed comes to is its own; where a promise is broken, the seed is named, and breaks it by itself."""

    def recorded(seed: int) -> list[list[tuple[int, int, int, int]]]:
        class Recorded(Simulation):
            def apply(self, plan: Plan, served: dict[str, float]) -> None:
                plans.append([(s.request, s.choice, rows, drafts) for s, rows, drafts in plan.spans])
                super().apply(plan, served)

        plans: list[list[tuple[int, int, int, int]]] = []
        Recorded(seed).run()
        return plans

    assert recorded(5) == recorded(5)
    assert recorded(5) != recorded(6)
    monkeypatch.setattr(scheduler, "STRETCH", 2.0)
    with pytest.raises(AssertionError, match=r"^seed \d+$") as broken:
        simulate(range(40))
    with pytest.raises(AssertionError) as again:
        simulate([int(str(broken.value).split()[1])])
    assert str(again.value.__cause__) == str(broken.value.__cause__)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_simulation_long() -> None:
    simulate(range(100_000, 110_000))
