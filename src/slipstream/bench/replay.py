"""Replaying a trace against a server: goodput, latencies, and what the prefix cache found."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

from slipstream.bench.load import Sample, ask, percentile, side_by_side
from slipstream.bench.serve import Progress, Running, server
from slipstream.bench.trace import Arrival, at_rate, infinite_cache_hits

CALIBRATION = 48
"""About so many requests of the trace are run side by side, to learn how many a second there can be."""
STREAMS = 16


def replay(
    model: str,
    options: Sequence[str],
    arrivals: Sequence[Arrival],
    load: float,
    ttft: float,
    tpot: float,
    progress: Progress,
) -> dict[str, Any]:
    """Run the requests at `load` times what the machine can do at most.

    Goodput counts requests whose first token came within `ttft` seconds and whose others took at most `tpot` each.
    """
    with server(model, options) as running:
        progress("how much it can do", 0, 1)
        some = arrivals[:: max(1, len(arrivals) // CALIBRATION)]
        capacity = asyncio.run(_capacity(running, some))
    # A second server: what the first one cached is gone.
    with server(model, options) as running:
        timed = at_rate(arrivals, load * capacity)
        samples = asyncio.run(_open_loop(running, timed, progress))
    begun, ended = min(s.sent for s in samples), max(s.tokens[-1] for s in samples)
    latencies = [(s.ttft, s.whole_tpot(a.answer)) for s, a in zip(samples, timed, strict=True)]
    good = sum(first <= ttft and each <= tpot for first, each in latencies)
    prompt_tokens, cached = sum(s.prompt_tokens for s in samples), sum(s.cached_tokens for s in samples)
    best = infinite_cache_hits(arrivals)
    return {
        "model": model,
        "options": list(options),
        "requests": len(samples),
        "mean_prompt": statistics.mean(len(a.prompt) for a in arrivals),
        "mean_answer": statistics.mean(a.answer for a in arrivals),
        "capacity": capacity,
        "load": load,
        "rate": load * capacity,
        "seconds": ended - begun,
        "throughput": len(samples) / (ended - begun),
        "output_tok_s": sum(a.answer for a in arrivals) / (ended - begun),
        "slo": {"ttft": ttft, "tpot": tpot},
        "goodput": good / (ended - begun),
        "good_share": good / len(samples),
        "ttft": _spread([first for first, _ in latencies]),
        "tpot": _spread([each for _, each in latencies]),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached,
        "infinite_cache_tokens": best,
        "hit_rate": cached / prompt_tokens,
        "hits_of_infinite": cached / best if best else None,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "p90": percentile(values, 0.9), "p99": percentile(values, 0.99)}


async def _capacity(running: Running, arrivals: Sequence[Arrival]) -> float:
    """Requests a second when there are always some waiting. Tokens are turned round, so that nothing is cached."""

    async def one(index: int) -> Sample:
        arrival = arrivals[index]
        return await ask(running.at, arrival.prompt[::-1], arrival.answer, seed=index)

    begun = time.perf_counter()
    await side_by_side(STREAMS, len(arrivals), one)
    return len(arrivals) / (time.perf_counter() - begun)


async def _open_loop(running: Running, arrivals: Sequence[Arrival], progress: Progress) -> list[Sample]:
    """Send each request when it is due, whatever became of those before."""
    begun, done = time.perf_counter(), 0

    async def one(index: int, arrival: Arrival) -> Sample:
        nonlocal done
        await asyncio.sleep(max(0.0, begun + arrival.at - time.perf_counter()))
        sample = await ask(running.at, arrival.prompt, arrival.answer, seed=index)
        done += 1
        progress("requests", done, len(arrivals))
        return sample

    return await asyncio.gather(*(one(index, arrival) for index, arrival in enumerate(arrivals)))
