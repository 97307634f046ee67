"""What speculation costs beside verifying: a pass of the drafter, and drafters that have nothing to say."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.bench.machine import spread
from slipstream.engine import Engine, Model
from slipstream.engine.drafters import with_taps
from slipstream.engine.flight import Flight
from slipstream.errors import UsageError
from slipstream.program import BLOCK_SLOTS, Draft
from slipstream.program.sampling import SamplingParams
from slipstream.roofline.cost import CostModel
from slipstream.scheduling import Offer, SpanPlan
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation import Ask, Controller, Drafter, SuffixDrafter

TOKENS, TURNS = 160, 16
"""Length of an answer, and turns of answers with and without drafters."""
ROUND = 4
"""Tokens drafted at a time."""


class _Silent(SuffixDrafter):
    """Looks for drafts as ever, and keeps them to itself."""

    def draft(self, answer: Answer, most: int) -> Draft | None:
        super().draft(answer, most)
        return None


class _Unasked(Controller):
    """Has a neural drafter keep what it keeps, and never asks it."""

    def offers(self, eligible: Sequence[Answer], cost: CostModel) -> dict[int, Offer]:
        """None, and none for a while."""
        self.asleep = TOKENS
        return {}


def overheads(
    model: Model,
    cost: CostModel,
    controller: Controller,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """Keys: silent_drafters (time of plain decoding with drafters of text that never draft, over time without any) and,
    with a neural drafter, unasked_drafter (the same of that one, which keeps what it would need) and pass (c: a pass
    over a plain step of the target run right after it, the host's work in both).

    `progress` is told percents.
    """
    bare = with_taps(model, ())
    without = Engine(bare, cost, prefix_cache=False)
    beside = {"silent_drafters": Engine(bare, cost, controller=Controller([_Silent()]), prefix_cache=False)}
    if (neural := controller.neural) is not None:
        keeping = _Unasked([neural])
        beside["unasked_drafter"] = Engine(
            model, cost, controller=keeping, prefix_cache=False, ahead=False if neural.needs.taps else None
        )
    ratios: dict[str, list[float]] = {name: [] for name in beside}
    if not prompts:
        raise UsageError("no prompt fits into the context together with its answer")
    for turn in range(TURNS):
        prompt = prompts[turn % len(prompts)]
        took = {engine: _seconds(engine, prompt) for engine in (without, *beside.values())[:: 1 if turn % 2 else -1]}
        for name, engine in beside.items():
            ratios[name].append(took[engine] / took[without])
        progress((turn + 1) * 50 // TURNS)
    result: dict[str, Any] = {name: spread(found) for name, found in ratios.items()}
    if neural is not None:
        engine = Engine(model, cost, controller=controller, ahead=False)
        engine.drafting.resting = True
        shares = []
        for done, prompt in enumerate(prompts):
            engine.add(prompt, params)
            while engine.busy:
                engine.step()
                shares += _pass_beside_a_step(engine, neural)
            progress(50 + (done + 1) * 50 // len(prompts))
        result["pass"] = spread(shares)
    return result


def _pass_beside_a_step(engine: Engine, drafter: Drafter) -> list[float]:
    """Draft for the answer under way, to no end, and run a plain step of it: seconds of a pass over those of the step.

    Nothing where the answer has ended, or its blocks have no room for drafts.
    """
    answer = next(iter(engine.sequences), None)
    room = len(answer.blocks) * BLOCK_SLOTS - len(answer.tokens) if answer is not None else 0
    if answer is None or not drafter.ready(answer) or room < drafter.scratch(ROUND):
        return []
    begun = time.perf_counter()
    (draft,) = drafter.propose([Ask(answer, ROUND, 0.0, lambda draft_class: 1.0)])
    drafted = time.perf_counter()
    flight = Flight.of([SpanPlan(answer, 1, 0)], drafted, {})
    planned = time.perf_counter()
    engine.model.executable.step(flight.rows, flight.draws)
    ended = time.perf_counter()
    engine.exclude(ended - begun)
    if draft is None:
        return []
    return [(drafted - begun) / (drafter.passes or len(draft)) / (ended - planned)]


def _seconds(engine: Engine, prompt: list[int]) -> float:
    """Median seconds of a decoded token: neither the prompt nor a hiccup counts."""
    number = engine.add(prompt, SamplingParams(temperature=1.0, seed=1, max_tokens=TOKENS, ignore_eos=True))
    seconds: list[float] = []
    while engine.busy:
        begun = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begun)
    engine.timings.pop(number)
    return statistics.median(seconds[1:])
