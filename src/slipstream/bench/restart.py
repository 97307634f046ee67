"""What a known beginning is worth after a restart: the time to the first token, over that of a cold one.

Each turn starts a server on an empty store, asks it, ends it, starts another on what that one left, and asks again.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream.bench.load import ask
from slipstream.bench.machine import spread
from slipstream.bench.serve import VOCABULARY, server
from slipstream.errors import SlipstreamError

WARM_UP, ANSWER = 32, 2
"""Tokens of a prompt of another beginning, so that no first step is measured, and of the answers."""


def measure(
    model: str, options: Sequence[str], prompt: int, turns: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Keys: restart (the ratio), cold_seconds, known_seconds (spreads), prompt_tokens, cached_tokens, stored_bytes."""
    rng = random.Random(0)

    def fresh(length: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(length)]

    cold, known, cached, size = [], [], 0, 0
    for turn in range(turns):
        tokens = fresh(prompt)
        with tempfile.TemporaryDirectory() as folder:
            store = [*options, "--prefix-store", folder]
            cold.append(_first_token(model, store, fresh(WARM_UP), tokens)[0])
            size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
            took, cached = _first_token(model, store, fresh(WARM_UP), tokens)
            if not cached:
                raise SlipstreamError("the second server knew nothing of the prompt: is the disk full?")
            known.append(took)
        progress(turn + 1)
    return {
        "restart": spread([k / c for k, c in zip(known, cold, strict=True)]), "cold_seconds": spread(cold),
        "known_seconds": spread(known), "prompt_tokens": prompt, "cached_tokens": cached, "stored_bytes": size,
    }  # fmt: skip


def _first_token(model: str, options: Sequence[str], other: list[int], prompt: list[int]) -> tuple[float, int]:
    """(seconds to the first token of a fresh server, tokens of the prompt that it knew)."""
    with server(model, options) as running:
        asyncio.run(ask(running.at, other, ANSWER))
        sample = asyncio.run(ask(running.at, prompt, ANSWER))
    return sample.ttft, sample.cached_tokens
