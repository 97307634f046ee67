"""Schema bombs: what a schema that is made to hurt takes until it is answered or refused, and a stream beside it."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.bench.load import Endpoint, Sample, ask
from slipstream.bench.machine import spread
from slipstream.bench.serve import VOCABULARY, server

PROMPT, ANSWER = 32, 96
LEAD = 0.1
"""Seconds that a stream goes on before the bomb comes."""
LONGEST = 60.0


def _nested(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


BACKTRACKING = (
    "^(a+)+$", "^(a|a)*$", "^((a{1,30}){1,30}){1,30}$", "^(([a-z])+.)+[A-Z]([a-z])+$", "^(a|aa)+b?$"
)  # fmt: skip
"""Patterns that take others time without end."""
BOMBS: Mapping[str, Any] = {
    "deep": _nested(300), "wide": {"enum": [f"value {n}" for n in range(60_000)]},
    "no reference": {"$ref": "#/$defs/nowhere"}, "a circle": {"$ref": "#"},
    "a circle of two": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "a bad type": {"type": "strange"}, "a bad pattern": {"type": "string", "pattern": "("},
    "a pattern that is none": {"type": "string", "pattern": 5}, "brackets": {"type": "string", "pattern": "(" * 4000},
    "exponential": {"type": "string", "pattern": "((((a{1,999}){1,999}){1,999}){1,999})"},
    "lookahead": {"type": "string", "pattern": "(?=a)b"}, "no schema": [1, 2], "a text": "not JSON",
    "a long pattern": {"type": "string", "pattern": "a" * 100_000},
    "all at once": {"allOf": [{"anyOf": [{"minLength": n}, {"maxLength": n}]} for n in range(40)]},
    "near the bounds: objects": {
        "type": "object",
        "properties": {f"property_{n}": {"type": "string", "pattern": "[a-z]{1,60}"} for n in range(1500)},
    },
    "near the bounds: choices": {
        "anyOf": [{"type": "object", "properties": {f"k{n}": {"enum": ["a", "b"]}}, "required": [f"k{n}"]}
                  for n in range(1200)],
    },
    "near the bounds: texts": {"enum": [f"value {n}" for n in range(9000)]},
    **{f"backtracking: {pattern}": {"type": "string", "pattern": pattern} for pattern in BACKTRACKING},
}  # fmt: skip


def under_another_name(schema: Any, name: object) -> Any:
    """The same, but not known: it is compiled anew."""
    return {**schema, "title": str(name)} if isinstance(schema, dict) else schema


def measure(model: str, options: Sequence[str], turns: int, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Keys: bombs (by name: status, seconds until the whole answer, tpot: that of a stream beside it over one alone;
    both as spreads over the turns), dearest (name of the one that took longest), worst_beside (of the one with the
    greatest tpot), median_tpot, turns.
    """
    rng = random.Random(0)
    found: dict[str, Any] = {}
    with server(model, options) as running:
        asyncio.run(_stream(running.at, rng))  # what is made once is made now
        for done, (name, schema) in enumerate(BOMBS.items()):
            progress(done, len(BOMBS))
            seconds, ratios = [], []
            for turn in range(turns):
                alone = asyncio.run(_stream(running.at, rng))
                body = json.dumps(_request(under_another_name(schema, turn))).encode()
                beside, (status, took) = asyncio.run(_together(running.at, rng, body))
                seconds.append(took)
                ratios.append(beside.whole_tpot(ANSWER) / alone.whole_tpot(ANSWER))
            found[name] = {"status": status, "seconds": spread(seconds), "tpot": spread(ratios)}
    dearest = max(found, key=lambda name: float(found[name]["seconds"]["median"]))
    worst = max(found, key=lambda name: float(found[name]["tpot"]["median"]))
    middle = statistics.median(entry["tpot"]["median"] for entry in found.values())
    return {"bombs": found, "dearest": dearest, "worst_beside": worst, "median_tpot": middle, "turns": turns}


def _request(schema: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 1, "guided_json": schema}


async def _stream(at: Endpoint, rng: random.Random) -> Sample:
    return await ask(at, [rng.randrange(VOCABULARY) for _ in range(PROMPT)], ANSWER)


async def _together(at: Endpoint, rng: random.Random, body: bytes) -> tuple[Sample, tuple[int, float]]:
    stream = asyncio.create_task(_stream(at, rng))
    await asyncio.sleep(LEAD)
    ended = await asyncio.to_thread(_post, at, body)
    return await stream, ended


def _post(at: Endpoint, body: bytes) -> tuple[int, float]:
    """(status, seconds until the whole answer is there)."""
    begun = time.perf_counter()
    connection = http.client.HTTPConnection(at.host, at.port, timeout=LONGEST)
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    return answer.status, time.perf_counter() - begun
