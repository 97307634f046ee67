"""What keeping to a schema costs, and whether it is kept: many schemas, each answered beside a free answer."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from slipstream.bench.machine import spread
from slipstream.bench.schemas import schemas
from slipstream.engine import Engine, Model
from slipstream.errors import UsageError
from slipstream.program.sampling import SamplingParams
from slipstream.roofline.cost import CostModel
from slipstream.speculation import Controller
from slipstream.text.grammars import of_schema

LONGEST = 1000
ASK = "Write a JSON object for a catalogue, by this schema:\n"


def measure(
    model: Model, cost: CostModel, controller: Controller | None, count: int, seed: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Keys: schemas, valid (share of whole answers that the schema allows, by an independent checker), whole, speed (of
    free decoding, by schema: tokens a second under the schema over those without), overall_speed (the same of all
    tokens and all seconds), compile_seconds, refused.
    """
    try:
        from jsonschema import Draft202012Validator
    except ImportError as error:
        raise UsageError("checking answers needs jsonschema: pip install jsonschema") from error
    engine = Engine(model, cost, controller=controller, prefix_cache=False)
    valid = whole = 0
    speeds, compiled, refused, wrong = [], [], [], []
    sums = [0.0] * 4
    for number, schema in enumerate(schemas(count, seed)):
        prompt = model.chat_prompt([{"role": "user", "content": ASK + json.dumps(schema)}])[
            : model.max_len - LONGEST - 1
        ]
        begun = time.perf_counter()
        try:
            grammar = of_schema(schema)
            engine.grammars.learn(grammar)
        except UsageError as error:
            refused.append(str(error))
            continue
        compiled.append(time.perf_counter() - begun)
        params = SamplingParams(temperature=0.7, seed=number, max_tokens=LONGEST, grammar=grammar)
        held, text, ended = _run(engine, prompt, params)
        free = SamplingParams(temperature=0.7, seed=number, max_tokens=max(held[0], 8), ignore_eos=True)
        bare, _, _ = _run(engine, prompt, free)
        if ended:
            whole += 1
            checker = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
            good = checker.is_valid(json.loads(text))
            valid += good
            wrong += [] if good else [text]
        if held[0] >= 8:
            speeds.append(held[0] / held[1] / (bare[0] / bare[1]))
            sums = [total + more for total, more in zip(sums, (*held, *bare), strict=True)]
        progress(number + 1)
    return {
        "schemas": count, "whole": whole, "valid": valid / max(whole, 1), "valid_of_all": valid / count,
        "speed": spread(speeds), "mean_speed": statistics.fmean(speeds),
        "overall_speed": sums[0] / sums[1] / (sums[2] / sums[3]), "compile_seconds": spread(compiled),
        "refused": refused[:5], "wrong": wrong[:5],
    }  # fmt: skip


def _run(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[tuple[int, float], str, bool]:
    """((tokens after the first, seconds), text, whether it ended by itself)."""
    number = engine.add(prompt, params)
    chunks = list(engine.run(number))
    timings = engine.timings.pop(number)
    text = "".join(chunk.text for chunk in chunks)
    return (max(timings.generated - 1, 1), max(timings.decode_seconds, 1e-9)), text, chunks[-1].finish_reason == "stop"
