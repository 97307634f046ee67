"""The accounting's self-test: known losses are injected into one part after the other; that part must be blamed.

Turns with and without the loss alternate, so that a machine whose speed drifts does not blur the difference.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from slipstream.engine.engine import Engine, Planner
from slipstream.engine.explain import Explanation, Load, explain, native_executable
from slipstream.engine.model import Model
from slipstream.program.sampling import SamplingParams
from slipstream.roofline.cost import CostModel
from slipstream.roofline.waterfall import Waterfall
from slipstream.scheduling import Limits, Plan, State, schedule

TOLERANCE = 0.10
TURNS = 7
TOKENS = 48
FOREIGN_PROMPT, FOREIGN_BEARABLE = 64, 10.0
"""Tokens of a foreign prompt, and the seconds of a step that are allowed for it."""
LEAST_LOSS = 1e-3
"""Seconds a token that are injected, or half a token's time if that is more."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One injection: seconds per token that were injected, what its part grew by, and what grew most besides it."""

    part: str
    injected: float
    blamed: float
    other: str
    other_seconds: float

    @property
    def passed(self) -> bool:
        """Whether the right part was blamed, for the right amount."""
        exact = abs(self.blamed - self.injected) <= TOLERANCE * self.injected
        return exact and self.other_seconds < self.blamed


class _Injector:
    """Waits, and counts how long it really did."""

    def __init__(self, seconds: float):
        self.seconds, self.total, self.count = seconds, 0.0, 0

    def wait(self) -> None:
        begun = time.perf_counter()
        while time.perf_counter() - begun < self.seconds:
            pass
        self.total += time.perf_counter() - begun
        self.count += 1


def _slow_planner(injector: _Injector) -> Planner:
    def planner(state: State) -> Plan:
        injector.wait()
        return schedule(state)

    return planner


def self_test(model: Model, cost: CostModel, prompt: list[int], progress: Progress | None = None) -> list[Verdict]:
    """Inject a loss into each part in turn; a thread is taken away if there is more than one."""
    executable = native_executable(model)
    params = SamplingParams(temperature=0.7, seed=7, max_tokens=TOKENS, ignore_eos=True)

    def run(
        on: Model = model, load: Load | None = None, planner: Planner = schedule, outside: _Injector | None = None
    ) -> Explanation:
        # Foreign prompts are to hurt: nothing is cached, and running streams must bear whole prompts in their steps.
        limits = Limits(on.max_rows, tpot_target=FOREIGN_BEARABLE)
        engine = Engine(on, cost, planner, limits, prefix_cache=False, ahead=False)
        return explain(engine, prompt, params, load, (lambda e, n: outside.wait()) if outside else None)

    plain = run().waterfall
    loss = max(LEAST_LOSS, 0.5 * plain.seconds)
    down = sum(1 for op in executable.program.weights if op.endswith("down.weight"))

    def scheduling() -> tuple[Explanation, float | None]:
        injector = _Injector(loss)
        return run(planner=_slow_planner(injector)), injector.total / injector.count

    def outside() -> tuple[Explanation, float | None]:
        injector = _Injector(loss)
        return run(outside=injector), injector.total / injector.count

    def delayed(op_class: str, each: float, total: float) -> tuple[Explanation, float | None]:
        executable.executor.set_delay(op_class, each)
        try:
            return run(), total
        finally:
            executable.executor.set_delay(op_class, 0.0)

    def foreign() -> tuple[Explanation, float | None]:
        return run(load=Load(foreign_prompt=min(FOREIGN_PROMPT, model.max_len - 2))), None

    def threads() -> tuple[Explanation, float | None]:
        fewer = executable.with_threads(executable.threads - 1)
        return run(on=replace(model, executable=fewer)), None

    cases: list[tuple[str, Callable[[], tuple[Explanation, float | None]]]] = [
        ("scheduling", scheduling),
        ("sampling", lambda: delayed("sample", loss, loss)),
        ("down", lambda: delayed("down", loss / down, loss)),
        ("outside", outside),
        ("foreign prefill", foreign),
    ]
    if executable.threads > 1:
        cases.append(("threads", threads))
    verdicts = []
    for index, (part, inject) in enumerate(cases):
        pairs = []
        for turn in range(TURNS):
            without = run().waterfall
            explained, injected = inject()
            pairs.append((without, explained.waterfall, injected))
            if progress:
                progress(index * TURNS + turn + 1, len(cases) * TURNS)
        verdicts.append(_judge(part, pairs))
    return verdicts


def _judge(part: str, pairs: list[tuple[Waterfall, Waterfall, float | None]]) -> Verdict:
    names = sorted({p.name for pair in pairs for waterfall in pair[:2] for p in waterfall.parts} - {part})

    def grown(name: str) -> float:
        return statistics.median(after[name] - before[name] for before, after, _ in pairs)

    injected = statistics.median(
        after.seconds - before.seconds if known is None else known for before, after, known in pairs
    )
    other = max(names, key=grown)
    return Verdict(part, injected, grown(part), other, grown(other))
