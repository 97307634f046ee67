"""Traces of real traffic: when requests came, how long they and their answers were, what they had in common.

Azure's (LLM inference 2023, CSV: TIMESTAMP, ContextTokens, GeneratedTokens) has lengths only; Mooncake's (JSONL:
timestamp in ms, input_length, output_length, hash_ids) also says which blocks of 512 tokens were the same. Both are
scaled down to a machine: lengths by a factor, arrivals by the rate that is asked for.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from slipstream.errors import UsageError
from slipstream.program import BLOCK_SLOTS

MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: seconds after the first one, its prompt's tokens, the length of its answer."""

    at: float
    prompt: list[int]
    answer: int


def read_trace(path: Path, count: int, scale: float, longest: int, vocabulary: int) -> list[Arrival]:
    """The first `count` requests, lengths times `scale`, together at most `longest`. Raises UsageError for no trace."""
    try:
        lines = path.read_text().splitlines()[: count + 1]
        reader = _mooncake if path.suffix == ".jsonl" else _azure
        found = list(reader(lines, scale, vocabulary))[:count]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is neither an Azure (CSV) nor a Mooncake (JSONL) trace: {error}") from error
    if not found:
        raise UsageError(f"{path} holds no requests")
    cut = [Arrival(a.at - found[0].at, a.prompt, min(a.answer, longest // 2)) for a in found]
    return [replace(a, prompt=a.prompt[: longest - a.answer - 1]) for a in cut]


def _length(tokens: int, scale: float) -> int:
    return max(2, round(tokens * scale))


def _azure(lines: Sequence[str], scale: float, vocabulary: int) -> Iterator[Arrival]:
    rng = random.Random(0)
    for row in csv.DictReader(lines):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        prompt = [rng.randrange(vocabulary) for _ in range(_length(int(row["ContextTokens"]), scale))]
        yield Arrival(at, prompt, _length(int(row["GeneratedTokens"]), scale))


def _mooncake(lines: Sequence[str], scale: float, vocabulary: int) -> Iterator[Arrival]:
    each = _length(MOONCAKE_BLOCK, scale)
    for line in lines:
        row = json.loads(line)
        prompt: list[int] = []
        for block in row["hash_ids"]:
            rng = random.Random(block)
            prompt += [rng.randrange(vocabulary) for _ in range(each)]
        length = _length(int(row["input_length"]), scale)
        yield Arrival(row["timestamp"] / 1e3, prompt[:length], _length(int(row["output_length"]), scale))


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests `rate` a second on the whole; what comes in bursts still does."""
    span = arrivals[-1].at
    stretch = (len(arrivals) - 1) / rate / span if span > 0 else 0.0
    return [Arrival(a.at * stretch, a.prompt, a.answer) for a in arrivals]


def infinite_cache_hits(arrivals: Sequence[Arrival]) -> int:
    """Prompt tokens that a cache would know which forgets nothing and learns each prompt as soon as it comes."""
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for arrival in arrivals:
        prompt, known = arrival.prompt, True
        path: tuple[int, ...] = ()
        for end in range(BLOCK_SLOTS, len(prompt) + 1, BLOCK_SLOTS):
            path = (hash(path), *prompt[end - BLOCK_SLOTS : end])
            known = known and path in seen and end < len(prompt)
            hits += BLOCK_SLOTS * known
            seen.add(path)
    return hits
