"""Random arrivals, cancellations, tiny pools, warm prefix caches, drafts: seeded answers keep their bits, no block is
lost.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from slipstream.engine import Chunk, Engine, LoadOptions, Model, Terms, load_model
from slipstream.engine.cost import fit_cost
from slipstream.engine.engine import Planner
from slipstream.engine.flight import Flight
from slipstream.program import BLOCK_SLOTS, KVFormat
from slipstream.program.sampling import SamplingParams
from slipstream.roofline.cost import CostModel
from slipstream.scheduling import Limits, Plan, State, schedule
from slipstream.speculation import Controller, Counts
from tests.speculation.scripted import FREE, Scripted

SCENARIOS, LONG_SCENARIOS = 1_000, 10_000
REQUESTS = 4


def params_of(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        seed=rng.randrange(1 << 32),
        max_tokens=rng.randint(1, rng.choice([20, 20, 70])),
        temperature=rng.choice([0.0, 0.7, 1.2]),
        top_p=rng.choice([1.0, 0.9]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        n=rng.choice([1, 1, 1, 2]),
        logprobs=1,
        ignore_eos=True,
        stop_token_ids=tuple(rng.sample(range(256), rng.choice([0, 0, 20]))),
    )


def prompts_of(rng: random.Random) -> Iterator[list[int]]:
    """Prompts that often begin alike, some of them to the last token."""
    common = [rng.randrange(256) for _ in range(rng.choice([31, 32, 64, 70]))]
    for _ in range(REQUESTS):
        shared = common[: rng.choice([0, 20, 32, len(common)])]
        yield shared + [rng.randrange(256) for _ in range(rng.randint(0 if shared else 1, 40))]


class CheckedEngine(Engine):
    """Where a plan is kept for another step, the scheduler must say the same."""

    def _repeat(self, flight: Flight, begun: float) -> bool:
        plan = schedule(self._state())
        repeated = super()._repeat(flight, begun)
        if repeated:
            assert [sequence for sequence, _, _ in plan.spans] == flight.drawing
            assert plan.preempted == plan.expired == plan.too_large == []
        return repeated


class Scenario:
    """A few requests arrive at random steps in a pool that holds one of them or two; some are cancelled."""

    def __init__(self, model: Model, cost: CostModel, seed: int):
        self.model, self.cost, self.seed = model, cost, seed
        self.rng = random.Random(seed)
        self.requests = [(prompt, params_of(self.rng)) for prompt in prompts_of(self.rng)]
        self.drafts = Counts()

    def expected(self) -> list[dict[int, Said]]:
        """What each request says alone on a cold engine without a prefix cache."""
        answers = []
        for prompt, params in self.requests:
            engine = Engine(self.model, prefix_cache=False)
            answers.append(collect(engine.run(engine.add(prompt, params))))
        return answers

    @staticmethod
    def unkind(rng: random.Random, spare: int) -> Planner:
        """The scheduler, but now and then somebody loses his blocks for no reason."""

        def planner(state: State) -> Plan:
            plan = schedule(state)
            running = [s for s in state.sequences if s.blocks and s.may_go_on and s not in plan.preempted]
            if not running or rng.random() > 0.05:
                return plan
            victim = rng.choice(running)
            plan.preempted.append(victim)
            left = state.spare - sum(len(s.blocks) for s in plan.saved)
            if len(victim.blocks) <= left and rng.random() < 0.7:
                plan.saved.append(victim)
            return plan._replace(spans=[span for span in plan.spans if span.sequence is not victim])

        return planner

    def run(self) -> int:
        """Play it; returns how many prompt tokens came from the cache."""
        rng, expected = self.rng, self.expected()
        limits = Limits(rng.choice([5, 17, 64]), rng.choice([1, 2, 100]))
        need = max(-(-(len(prompt) + (params.max_tokens or 0)) // BLOCK_SLOTS) for prompt, params in self.requests)
        model = replace(self.model, blocks=need + rng.randint(0, 4), spare_blocks=rng.choice([0, 3, 12]))
        cost = rng.choice([None, self.cost, replace(self.cost, copy=0.0)])
        planner = rng.choice([schedule, self.unkind(rng, model.spare_blocks)])
        controller = self.drafting(expected) if rng.random() < 0.7 else None
        if controller is not None:
            cost = rng.choice([FREE, replace(FREE, copy=1.0), self.cost])
        engine = CheckedEngine(
            model,
            cost,
            planner,
            limits,
            prefix_cache=rng.random() < 0.8,
            ahead=rng.random() < 0.6,
            controller=controller,
        )
        waiting, running, cancelled = list(range(REQUESTS)), {}, set()
        got: dict[int, list[Chunk]] = {}
        while waiting or engine.busy:
            if waiting and (not engine.busy or rng.random() < 0.3):
                index = waiting.pop(0)
                terms = Terms(rng.choice(["", "a"]), rng.choice([0, 0, 5]))
                running[engine.add(*self.requests[index], terms)] = index
            if running and rng.random() < 0.02:
                number = rng.choice(list(running))
                cancelled.add(running[number])
                engine.cancel(number)
            for chunk in engine.step() if engine.busy else []:
                got.setdefault(running[chunk.request], []).append(chunk)
            engine.check()
        if controller is not None:
            for counts in controller.counts().values():
                self.drafts.merge(counts)
        assert engine.pool.available == engine.pool.size
        assert engine.spare.free == engine.spare.size
        self.preempted, self.saved = engine.preemptions, engine.saved
        for index, wanted in enumerate(expected):
            seen = collect(got.get(index, []))
            for choice, news in wanted.items():
                mine = seen.get(choice, Said())
                where = f"seed {self.seed}, request {index}"
                assert mine == news or (index in cancelled and mine.begins(news)), where
        return engine.prefix.stats.hits if engine.prefix else 0

    def drafting(self, expected: list[dict[int, Said]]) -> Controller:
        """A drafter that knows the answers and is wrong now and then: chains or trees, of any length."""
        rng = self.rng
        wrong, branches = rng.choice([0.0, 0.2, 0.6]), rng.choice([1, 1, 2, 3])
        scripted = Scripted(256, wrong, rng.choice([1, 3, 8, 16]), branches, self.seed)
        for (prompt, _), answers in zip(self.requests, expected, strict=True):
            scripted.answers[tuple(prompt)] = {choice: said.tokens for choice, said in answers.items()}
        return Controller([scripted])


@dataclass
class Said:
    """What one choice of an answer came to."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    text: str = ""
    finish: str | None = None

    def begins(self, whole: Said) -> bool:
        """Whether it is the beginning of another."""
        tokens, logprobs = whole.tokens[: len(self.tokens)], whole.logprobs[: len(self.logprobs)]
        return (self.tokens, self.logprobs) == (tokens, logprobs) and whole.text.startswith(self.text)


def collect(chunks: Iterable[Chunk]) -> dict[int, Said]:
    """What was said, by choice."""
    news: dict[int, Said] = {}
    for chunk in chunks:
        said = news.setdefault(chunk.choice, Said())
        said.tokens += chunk.token_ids
        said.logprobs += chunk.logprobs
        said.text += chunk.text
        said.finish = chunk.finish_reason or said.finish
    return news


@pytest.fixture(scope="module", params=[KVFormat.BF16, KVFormat.INT8])
def model(request: pytest.FixtureRequest, tiny_gguf: Path) -> Model:
    return load_model(str(tiny_gguf), LoadOptions(max_rows=64, kv_format=request.param, threads=1))


def play(model: Model, seeds: range) -> None:
    cost = fit_cost(model)
    scenarios = [Scenario(model, cost, seed) for seed in seeds]
    assert sum(scenario.run() for scenario in scenarios) > 0, "no scenario met the prefix cache"
    assert sum(s.preempted - s.saved for s in scenarios) > len(scenarios) / 20, "hardly anybody was computed again"
    assert sum(s.saved for s in scenarios) > len(scenarios) / 20, "hardly anybody was moved out of the cache and back"
    drafts = Counts()
    for scenario in scenarios:
        drafts.merge(scenario.drafts)
    assert drafts.rounds > 5 * len(scenarios), "hardly anything was drafted"
    assert 0.2 < drafts.acceptance < 0.8, "drafts that hold and drafts that do not are both wanted"


@pytest.mark.features(
    "sampling",
    "n",
    "penalties",
    "logprobs",
    "stop",
    "prefix cache",
    "giving way",
    "moved out",
    "text drafts",
    "ahead",
    "int8 cache",
)
def test_jitter(model: Model) -> None:
    play(model, range(SCENARIOS // 2))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_jitter_long(model: Model) -> None:
    play(model, range(1_000_000, 1_000_000 + LONG_SCENARIOS // 2))
