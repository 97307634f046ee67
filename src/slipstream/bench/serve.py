"""Serving, measured through HTTP: streams side by side, a long prompt among them, cached prefixes, and idling."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.bench.load import Sample, ask, percentile, side_by_side, summary
from slipstream.errors import SlipstreamError

Progress = Callable[[str, int, int], None]
VOCABULARY = 1000
"""Prompts are random ids below this."""
LONG_PROMPT, CACHED_PROMPT = 4000, 2000
START_SECONDS, IDLE_SECONDS = 300.0, 5.0


@dataclass(frozen=True, slots=True)
class Running:
    """A server that was started for measuring."""

    host: str
    port: int
    process: subprocess.Popen[str]


@contextmanager
def server(model: str, options: Sequence[str]) -> Iterator[Running]:
    """Start `slipstream serve` on a free port. Raises SlipstreamError with what it said if it does not start."""
    command = [sys.executable, "-m", "slipstream", "serve", model, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            if match := re.search(r"http://([\d.]+):(\d+)", line):
                yield Running(match[1], int(match[2]), process)
                return
        raise SlipstreamError("the server did not start: " + "".join(said)[-2000:])
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def measure(
    model: str, options: Sequence[str], streams: Sequence[int], prompt: int, answer: int, progress: Progress
) -> dict[str, Any]:
    """Keys: streams (throughput and latencies by their number), interference, prefix, idle."""
    rng = random.Random(0)

    def fresh(length: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(length)]

    with server(model, options) as running:

        async def one(index: int, length: int = prompt, tokens: int = answer) -> Sample:
            return await ask(running.host, running.port, fresh(length), tokens, seed=index)

        asyncio.run(side_by_side(1, 2, one))
        by_streams = {}
        for done, count in enumerate(streams):
            progress("streams", done, len(streams))
            samples = asyncio.run(side_by_side(count, max(6, 2 * count), one))
            by_streams[str(count)] = summary(samples, answer)
        progress("a long prompt among streams", 0, 1)
        interference = asyncio.run(_interference(running, fresh))
        progress("cached prefixes", 0, 1)
        prefix = asyncio.run(_prefix(running, fresh))
        progress("idle", 0, 1)
        idle = _idle(running)
    return {
        "model": model,
        "options": list(options),
        "prompt": prompt,
        "answer": answer,
        "serve_streams": by_streams,
        "interference": interference,
        "prefix": prefix,
        "idle": idle,
    }


async def _interference(running: Running, fresh: Callable[[int], list[int]]) -> dict[str, Any]:
    """Gaps of four running streams without, and with a long prompt that comes in. The prompt's own first token too."""

    async def streams() -> list[Sample]:
        return await asyncio.gather(*(ask(running.host, running.port, fresh(64), 300, seed=i) for i in range(4)))

    async def long_prompt() -> Sample:
        await asyncio.sleep(0.5)
        return await ask(running.host, running.port, fresh(LONG_PROMPT), 2)

    alone, beside, intruders = [], [], []
    for _ in range(3):
        alone += [gap for sample in await streams() for gap in sample.gaps]
        together = await asyncio.gather(streams(), long_prompt())
        beside += [gap for sample in together[0] for gap in sample.gaps]
        intruders.append(together[1].ttft)
    return {
        "prompt": LONG_PROMPT,
        "gap_p99_alone": percentile(alone, 0.99),
        "gap_p99_beside": percentile(beside, 0.99),
        "ratio": percentile(beside, 0.99) / percentile(alone, 0.99),
        "long_prompt_ttft": statistics.median(intruders),
    }


async def _prefix(running: Running, fresh: Callable[[int], list[int]]) -> dict[str, Any]:
    """Time to the first token of a prompt that is new, and of the same one again; medians of five."""
    cold, warm = [], []
    for _ in range(5):
        prompt = fresh(CACHED_PROMPT)
        cold.append((await ask(running.host, running.port, prompt, 2)).ttft)
        warm.append((await ask(running.host, running.port, prompt, 2)).ttft)
    ratio = statistics.median(w / c for w, c in zip(warm, cold, strict=True))
    return {
        "prompt": CACHED_PROMPT,
        "cold_ttft": statistics.median(cold),
        "warm_ttft": statistics.median(warm),
        "ratio": ratio,
    }


def _idle(running: Running) -> dict[str, Any]:
    """Share of a core that the server and its engine use when nobody asks, and their memory."""
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    pids = [running.process.pid, *map(int, children)]

    def seconds() -> float:
        total = 0
        for pid in pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    time.sleep(1.0)
    before = seconds()
    time.sleep(IDLE_SECONDS)
    memory = {}
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        match = re.search(r"VmRSS:\s+(\d+)", status)
        memory[str(pid)] = int(match[1]) * 1024 if match else 0
    return {"cpu": (seconds() - before) / IDLE_SECONDS, "resident_bytes": sum(memory.values())}
