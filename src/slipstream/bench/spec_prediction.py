"""Predicted S against measured S over batch, draft length and context, with drafts that hold with a known chance."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.bench.machine import spread
from slipstream.engine import Engine, Model
from slipstream.errors import SlipstreamError
from slipstream.program import Draft
from slipstream.program.sampling import SamplingParams
from slipstream.roofline.cost import CostModel
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation import Ask, Controller, Drafter, ForcedVerification

BATCHES, LENGTHS, CONTEXTS = (1, 4, 16), (1, 2, 4, 8), (96, 1024)
ROOM = 128
"""Tokens after the context that a model must have room for."""
ROUNDS, LEAST_STEPS, WARM_UP = 160, 32, 12
"""Verifications that are looked at, in so many steps at least: how many drafts hold is a matter of chance too."""


class FixedDrafter(Drafter):
    """Drafts the same tokens always, as many as it is told."""

    name = "fixed"

    def __init__(self, chance: float):
        self.chance = chance

    def prior(self, draft_class: int) -> float:
        """The chance with which they are made to hold."""
        return self.chance

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        """As many tokens as are wanted."""
        return [Draft.chain([1] * ask.most, [0] * ask.most, self.name) for ask in asks]


@dataclass(slots=True)
class _Window:
    """Some steps of an engine: what they took and brought, and by how much drafts should have made them faster."""

    seconds: float
    tokens: int
    predicted: float
    drafted: float
    """Drafts of a verification."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def measure(
    model: Model, cost: CostModel, chance: float, turns: int, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Keys: cells (batch, draft_len, context, drafted, predicted, measured, error), median_error, worst_error, and
    least_measured.
    """
    drafter = FixedDrafter(chance)
    controller = Controller([drafter])
    engine = Engine(model, cost, controller=controller, verification=ForcedVerification(chance))
    rng = random.Random(0)
    cells = [(b, k, c) for c in CONTEXTS for b in BATCHES for k in LENGTHS if c + ROOM <= model.max_len]
    if not cells:
        raise SlipstreamError(f"the model's context of {model.max_len} tokens holds no prompt of {CONTEXTS[0]}")
    prompts = {
        c: [[rng.randrange(model.config.vocabulary) for _ in range(c)] for _ in range(max(BATCHES))] for c in CONTEXTS
    }
    report: list[dict[str, Any]] = []
    for done, (batch, length, context) in enumerate(cells):
        drafter.most = length
        pairs = []
        for turn in range(turns):
            pair = {}
            for ours in (False, True) if turn % 2 else (True, False):
                engine.drafting.resting = not ours
                steps = _steps(batch, length, model.max_len - context)
                pair[ours] = _window(engine, controller, prompts[context][:batch], steps)
            pairs.append(pair)
        ratios = [pair[True].rate / pair[False].rate for pair in pairs]
        measured, predicted = statistics.median(ratios), statistics.median(p[True].predicted for p in pairs)
        report.append(
            {
                "batch": batch, "draft_len": length, "context": context,
                "drafted": statistics.mean(pair[True].drafted for pair in pairs),
                "predicted": predicted, "measured": measured, "spread": spread(ratios),
                "error": predicted / measured - 1.0,
            }
        )  # fmt: skip
        progress(done + 1, len(cells))
    errors = [abs(cell["error"]) for cell in report]
    return {
        "model": model.reference,
        "acceptance": chance,
        "turns": turns,
        "cells": report,
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "least_measured": min(cell["measured"] for cell in report),
    }


def _steps(batch: int, length: int, room: int) -> int:
    """Steps of a window: answers end in none of them, however many drafts hold."""
    return min(max(LEAST_STEPS, ROUNDS // batch), room // (length + 1) - WARM_UP - 2)


def _window(engine: Engine, controller: Controller, prompts: Sequence[list[int]], steps: int) -> _Window:
    """Let answers begin, and look at `steps` steps in which all of them decode."""
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    numbers = [engine.add(prompt, params) for prompt in prompts]
    while not all(_decodes(answer) for answer in engine.sequences):
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    pace, before = controller.pace, (controller.pace.spent, controller.pace.predicted)
    rounds, drafts = _counts(controller)
    begun, tokens = time.perf_counter(), 0
    for _ in range(steps):
        tokens += sum(len(chunk.token_ids) for chunk in engine.step())
    seconds = time.perf_counter() - begun
    spent, predicted = pace.spent - before[0], pace.predicted - before[1]
    more_rounds, more_drafts = _counts(controller)
    for number in numbers:
        engine.cancel(number)
        engine.timings.pop(number)
    while engine.busy:
        engine.step()
    undrafted = max(seconds - spent, 0.0)
    drafted = (more_drafts - drafts) / max(more_rounds - rounds, 1)
    return _Window(seconds, tokens, (predicted + undrafted) / (spent + undrafted), drafted)


def _decodes(answer: Answer) -> bool:
    return answer.generated > 0


def _counts(controller: Controller) -> tuple[int, int]:
    totals = controller.counts().values()
    return sum(counts.rounds for counts in totals), sum(counts.drafted for counts in totals)
