"""What a known beginning is worth after a restart: the time to the first token, over that of a cold one."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.bench.machine import spread
from slipstream.engine import Engine, Model
from slipstream.errors import UsageError
from slipstream.kernels.native import NativeExecutable
from slipstream.kvcache import Shelf
from slipstream.program.sampling import SamplingParams
from slipstream.roofline.cost import CostModel

MOST_BYTES = 4 << 30


def measure(model: Model, cost: CostModel, prompt: int, turns: int, progress: Callable[[int], None]) -> dict[str, Any]:
    """Keys: ratio (spread), cold_seconds, known_seconds, stored_bytes. Every turn begins with empty engines."""
    executable = model.executable
    if not isinstance(executable, NativeExecutable):
        raise UsageError("only the native backend keeps cached blocks")
    rng = random.Random(0)
    tokens = [rng.randrange(model.config.vocabulary) for _ in range(prompt)]
    ratios, cold, known, size = [], [], [], 0
    with tempfile.TemporaryDirectory() as folder:

        def engine() -> tuple[Engine, Shelf]:
            shelf = Shelf(Path(folder), MOST_BYTES, executable.operands.cache.block_bytes, "bench")
            made = Engine(model, cost)
            made.keep_blocks(shelf)
            return made, shelf

        first, shelf = engine()
        _first_token(first, tokens)
        while first.shelving:
            first.shelve()
        size = shelf.bytes
        for turn in range(turns):
            took = {}
            for name in ("cold", "known")[:: 1 if turn % 2 else -1]:
                took[name] = _first_token(Engine(model, cost) if name == "cold" else engine()[0], tokens)
            cold.append(took["cold"])
            known.append(took["known"])
            ratios.append(took["known"] / took["cold"])
            progress(turn + 1)
    return {
        "restart": spread(ratios), "cold_seconds": spread(cold), "known_seconds": spread(known),
        "prompt_tokens": prompt, "stored_bytes": size,
    }  # fmt: skip


def _first_token(engine: Engine, tokens: list[int]) -> float:
    begun = time.perf_counter()
    number = engine.add(tokens, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    took = 0.0
    for _ in engine.run(number):
        took = took or time.perf_counter() - begun
    return took
