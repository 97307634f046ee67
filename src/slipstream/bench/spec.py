"""Speculation against plain decoding on the same prompts, in turns: S, tau, v and d, by category of traffic."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.bench.load import percentile
from slipstream.bench.machine import spread
from slipstream.bench.prompts import Message, Talk
from slipstream.bench.spec_costs import Rounds
from slipstream.engine import Engine, Model
from slipstream.errors import SlipstreamError, UsageError
from slipstream.program import StepShape
from slipstream.program.sampling import SamplingParams
from slipstream.roofline.cost import CostModel
from slipstream.roofline.speculation import speedup
from slipstream.speculation import Controller, Counts, Verification
from slipstream.speculation.statistics import Pace

Progress = Callable[[int, int], None]
_CONTEXT = 256
"""Tokens of context at which v and d are stated."""


@dataclass
class _Side:
    """What one way of decoding did on a category's prompts."""

    tokens: int = 0
    seconds: float = 0.0
    drafts: Counts = field(default_factory=Counts)
    spent: float = 0.0
    plain: float = 0.0
    predicted: float = 0.0


def measure(
    model: Model,
    cost: CostModel,
    controller: Controller,
    verification: Verification,
    talks: Sequence[Talk],
    params: SamplingParams,
    progress: Progress | None = None,
    rounds: Rounds | None = None,
) -> dict[str, Any]:
    """One answer after the other, plain and drafted by turns; decode time only, from the first token on.

    `rounds` watch what each step takes.
    """
    engine = Engine(model, cost, controller=controller, verification=verification)
    sides: dict[str, tuple[_Side, _Side]] = defaultdict(lambda: (_Side(), _Side()))
    ratios: dict[str, list[float]] = defaultdict(list)
    identical = True
    for number, talk in enumerate(talks):
        messages: list[Message] = list(talk.before)
        for turn in talk.turns:
            messages.append({"role": "user", "content": turn})
            prompt = model.chat_prompt(messages)
            if len(prompt) + 8 > model.max_len:
                break
            answers: dict[bool, tuple[list[int], float]] = {}
            for ours in (False, True) if number % 2 else (True, False):
                engine.drafting.resting = not ours
                answers[ours] = _answer(engine, prompt, params, sides[talk.category][ours], rounds)
            identical &= answers[False][0] == answers[True][0]
            if answers[True][1] > 0 and answers[False][1] > 0:
                ratios[talk.category].append(answers[False][1] / answers[True][1])
            text = model.tokenizer.decode(answers[False][0])
            messages.append({"role": "assistant", "content": text})
        if progress:
            progress(number + 1, len(talks))
    if not ratios:
        raise SlipstreamError("no prompt was answered with more than one token")
    categories = {name: _report(*sides[name], ratios[name]) for name in sides if ratios[name]}
    return {
        "model": model.reference,
        "identical": identical,
        "temperature": params.temperature,
        "max_tokens": params.max_tokens,
        "prompts": len(talks),
        "categories": categories,
        "mean_speedup": statistics.mean(entry["speedup"] for entry in categories.values()),
        "least_speedup": min(entry["speedup"] for entry in categories.values()),
        "drafters": {name: _counts(counts) for (name, _), counts in controller.counts().items()},
        **costs(cost, controller),
        "c": _pass_share(sides, controller),
    }


def _pass_share(sides: Mapping[str, tuple[_Side, _Side]], controller: Controller) -> float:
    """c: a pass of the neural drafter over a plain step, both as measured here; 0 without one."""
    plain = [side for side, _ in sides.values()]
    step = sum(side.seconds for side in plain) / sum(side.tokens for side in plain)
    return controller.neural.pass_seconds(1) / step if controller.neural is not None else 0.0


def _answer(
    engine: Engine, prompt: list[int], params: SamplingParams, side: _Side, rounds: Rounds | None
) -> tuple[list[int], float]:
    """(tokens, seconds per token after the first)."""
    pace = engine.controller.pace if engine.controller is not None else Pace()
    before = (pace.spent, pace.plain, pace.predicted)
    number = engine.add(prompt, params)
    tokens: list[int] = []
    while engine.busy:
        chunks = engine.step() if rounds is None else rounds.step(engine, number)
        tokens += [token for chunk in chunks for token in chunk.token_ids]
    timings = engine.timings.pop(number)
    later = timings.generated - 1
    side.tokens += max(later, 0)
    side.seconds += timings.decode_seconds if later > 0 else 0.0
    side.drafts.merge(timings.drafts)
    side.spent += pace.spent - before[0]
    side.plain += pace.plain - before[1]
    side.predicted += pace.predicted - before[2]
    return tokens, timings.decode_seconds / later if later > 0 else 0.0


def _report(plain: _Side, drafted: _Side, ratios: Sequence[float]) -> dict[str, Any]:
    """A category: S is tokens a second over tokens a second."""
    return {
        "plain_tok_s": plain.tokens / plain.seconds,
        "tok_s": drafted.tokens / drafted.seconds,
        "speedup": (drafted.tokens / drafted.seconds) / (plain.tokens / plain.seconds),
        "spread": spread(ratios),
        "answers": len(ratios),
        "speedup_of_drafted_steps": drafted.plain / drafted.spent if drafted.spent else 1.0,
        "speedup_predicted": drafted.predicted / drafted.spent if drafted.spent else 1.0,
        **_counts(drafted.drafts),
    }


def _counts(counts: Counts) -> dict[str, Any]:
    return {
        "verifications": counts.rounds,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "tau": counts.tau,
        "tau_without_bonus": counts.tau - 1.0,
        "acceptance_by_position": counts.conditional(),
    }


def costs(cost: CostModel, controller: Controller, lengths: Sequence[int] = range(1, 9)) -> dict[str, Any]:
    """v(K + 1) and d(K) in steps of one row, by the cost model."""

    def step(rows: int) -> float:
        return cost.seconds(StepShape(rows, rows, 0, rows * _CONTEXT))

    one, neural = step(1), controller.neural
    draft_pass = neural.pass_seconds(1) / one if neural is not None else 0.0
    passes = {k: (neural.passes or k) if neural is not None else 0 for k in lengths}
    return {
        "verify_cost": {str(k): step(k + 1) / one for k in lengths},
        "draft_cost": {str(k): passes[k] * draft_pass for k in lengths},
        "plain_step_seconds": one,
    }


def forced(result: dict[str, Any], acceptance: float, rounds: Rounds) -> dict[str, Any]:
    """What the formula says of a run in which every draft was accepted with one chance, by the costs measured in it."""
    measured, rows = rounds.report(), []
    lengths = sorted(map(int, measured["verify_cost"]))
    for name, entry in result["categories"].items():
        if not lengths or not entry["verifications"]:
            continue
        mean = entry["drafted"] / entry["verifications"]
        length = min(lengths, key=lambda k: abs(k - mean))
        verify, draft, rest = (measured[key][str(length)] for key in ("verify_cost", "draft_cost", "overhead"))
        predicted = speedup(entry["tau"], length, lambda n, v=verify: v, lambda k, d=draft: d, rest)  # type: ignore[misc]
        rows.append({"category": name, "draft_len": length, "tau": entry["tau"], "formula_speedup": predicted})
    return result | {"forced_acceptance": acceptance, "measured_costs": measured, "formula": rows}


def side_by_side(
    model: Model,
    cost: CostModel,
    controller: Controller,
    talks: Sequence[Talk],
    params: SamplingParams,
    streams: int,
    turns: int,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """`streams` answers at a time, plain and drafted by turns: throughput, and seconds per token of each answer.

    Answers begin together and the next ones when all have ended, so that both ways have the same company: where a place
    is taken again at once, whoever decodes faster reads more prompts in the same time, and they hold up the others.
    """
    prompts = [model.chat_prompt([*talk.before, {"role": "user", "content": talk.turns[0]}]) for talk in talks]
    prompts = [prompt for prompt in prompts if len(prompt) + 8 <= model.max_len]
    if len(prompts) < streams:
        raise UsageError(f"{len(prompts)} prompts fit into the context, {streams} streams need as many at least")
    rates: dict[bool, list[float]] = {False: [], True: []}
    tpots: dict[bool, list[float]] = {False: [], True: []}
    tails: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(turns):
        for ours in (False, True) if turn % 2 else (True, False):
            for drafter in controller.drafters:
                drafter.forget()  # or it would know the answers by heart
            engine = Engine(model, cost, controller=controller if ours else None, prefix_cache=False)
            rate, seconds = _crowd(engine, prompts, params, streams)
            rates[ours].append(rate)
            tpots[ours] += seconds
            tails[ours].append(percentile(seconds, 0.99))
        if progress:
            progress(turn + 1, turns)
    total = Counts()
    for counts in controller.counts().values():
        total.merge(counts)
    return {
        "model": model.reference,
        "streams": streams,
        "prompts": len(prompts),
        "turns": turns,
        "plain_tok_s": statistics.median(rates[False]),
        "tok_s": statistics.median(rates[True]),
        "speedup": statistics.median(a / b for a, b in zip(rates[True], rates[False], strict=True)),
        "spread": spread([a / b for a, b in zip(rates[True], rates[False], strict=True)]),
        "p99_tpot_ratio": spread([a / b for a, b in zip(tails[True], tails[False], strict=True)]),
        "plain_tpot": {"median": statistics.median(tpots[False]), "p99": percentile(tpots[False], 0.99)},
        "tpot": {"median": statistics.median(tpots[True]), "p99": percentile(tpots[True], 0.99)},
        **_counts(total),
    }


def _crowd(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, streams: int
) -> tuple[float, list[float]]:
    """(tokens a second of all, seconds per token of each answer after its first one)."""
    tpots: list[float] = []
    tokens = 0
    begun = time.perf_counter()
    for first in range(0, len(prompts) - streams + 1, streams):
        numbers = [engine.add(prompt, params) for prompt in prompts[first : first + streams]]
        while engine.busy:
            tokens += sum(len(chunk.token_ids) for chunk in engine.step())
        for number in numbers:
            timings = engine.timings.pop(number)
            if timings.generated > 1:
                tpots.append(timings.decode_seconds / (timings.generated - 1))
    return tokens / (time.perf_counter() - begun), tpots
