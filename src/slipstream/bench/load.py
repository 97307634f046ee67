"""A minimal streaming client and what it measures: time to first token, gaps between tokens, tokens a second."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import SlipstreamError

START, END = b"data: {", b"data: [DONE]"


@dataclass
class Sample:
    """One request: when it was sent, when each event with a token came (seconds of the same clock)."""

    sent: float
    tokens: list[float] = field(default_factory=list)
    status: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.tokens[0] - self.sent

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first."""
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]


async def ask(host: str, port: int, prompt: Sequence[int] | str, tokens: int, key: str = "", seed: int = 0) -> Sample:
    """A streamed completion. Raises SlipstreamError if the server does not answer with a stream."""
    body = json.dumps(
        {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0.7, "seed": seed}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    sample = Sample(time.perf_counter())
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        raise SlipstreamError(f"no server answers at {host}:{port} ({error.strerror or error})") from error
    try:
        writer.write(head.encode() + b"\r\n" + body)
        status = await reader.readline()
        sample.status = int(status.split()[1])
        if sample.status != 200:
            raise SlipstreamError(f"the server answered {status.decode().strip()}: {(await reader.read())[-300:]!r}")
        while line := await reader.readline():
            if line.startswith(START):
                sample.tokens.append(time.perf_counter())
            elif line.startswith(END):
                break
    finally:
        writer.close()
    if len(sample.tokens) < 2:
        raise SlipstreamError("the stream ended without tokens")
    return sample


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(samples: Sequence[Sample], answer_tokens: int) -> dict[str, Any]:
    """Throughput and latencies of requests that ran side by side, each with `answer_tokens` tokens.

    Events may hold several tokens' text or none, so tokens are counted by what was asked for.
    """
    begun, ended = min(s.sent for s in samples), max(s.tokens[-1] for s in samples)
    ttft, gaps = [s.ttft for s in samples], [gap for s in samples for gap in s.gaps]
    tpot = [(s.tokens[-1] - s.tokens[0]) / (answer_tokens - 1) for s in samples]
    return {
        "requests": len(samples),
        "output_tok_s": answer_tokens * len(samples) / (ended - begun),
        "ttft": {"median": statistics.median(ttft), "p99": percentile(ttft, 0.99)},
        "tpot": {"median": statistics.median(tpot), "p99": percentile(tpot, 0.99)},
        "gap": {"median": statistics.median(gaps), "p99": percentile(gaps, 0.99), "max": max(gaps)},
    }


async def side_by_side(streams: int, requests: int, one: Callable[[int], Awaitable[Sample]]) -> list[Sample]:
    """`requests` requests, `streams` at a time."""
    waiting = iter(range(requests))
    samples: list[Sample] = []

    async def worker() -> None:
        for index in waiting:
            samples.append(await one(index))

    await asyncio.gather(*(worker() for _ in range(streams)))
    return samples
