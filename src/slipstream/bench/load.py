"""A minimal streaming client and what it measures: time to first token, gaps between tokens, tokens a second."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import time
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import SlipstreamError, UsageError

START, END = b"data: {", b"data: [DONE]"
MOST_SHOWN = 300
"""Bytes of an answer that is no stream that are shown."""
_ASK_USAGE = {"include_usage": True}


@dataclass
class Sample:
    """One request: when it was sent, when each event with a token came (seconds of the same clock).

    `prompt_tokens` and `cached_tokens` are the server's own account of the prompt.
    """

    sent: float
    tokens: list[float] = field(default_factory=list)
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.tokens[0] - self.sent

    def whole_tpot(self, answer: int) -> float:
        """Mean seconds per token after the first of an answer of so many; an event may hold several, or none."""
        return (self.tokens[-1] - self.tokens[0]) / max(answer - 1, 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that speaks OpenAI's completions; `model` is what requests call it by, if they have to."""

    host: str
    port: int
    model: str | None = None

    @classmethod
    def of(cls, url: str) -> Endpoint:
        """From a base URL; asks which model it serves. Raises UsageError if nothing answers."""
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"{url!r} is not an http:// address")
        port = parts.port or 80
        try:
            with urllib.request.urlopen(f"http://{parts.hostname}:{port}/v1/models", timeout=10) as answer:
                return cls(parts.hostname, port, json.load(answer)["data"][0]["id"])
        except (OSError, ValueError, LookupError) as error:
            raise UsageError(f"{url} does not say which model it serves: {error}") from error


async def ask(at: Endpoint, prompt: Sequence[int] | str, tokens: int, key: str = "", seed: int | None = None) -> Sample:
    """A streamed completion. Raises SlipstreamError if the server does not answer with a stream."""
    message, loop = _message(at, prompt, tokens, key, seed), asyncio.get_running_loop()
    sample = Sample(time.perf_counter())
    try:
        transport, listener = await loop.create_connection(lambda: _Listener(sample), at.host, at.port)
    except OSError as error:
        raise SlipstreamError(f"no server answers at {at.host}:{at.port} ({error.strerror or error})") from error
    try:
        transport.write(message)
        await listener.ended
    finally:
        transport.close()
    if sample.status != 200:
        raise SlipstreamError(f"the server answered {sample.status}: {listener.end!r}")
    if not sample.tokens:
        raise SlipstreamError("the stream ended without tokens")
    return sample


class _Listener(asyncio.Protocol):
    """Takes a stream's lines as they come, in few steps: whoever measures on the server's machine takes its time."""

    def __init__(self, sample: Sample):
        self.sample, self.end = sample, b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        """Some lines, and the beginning of another."""
        now, sample = time.perf_counter(), self.sample
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(START):
                if b'"choices":[]' in line:  # the last event: what the prompt came to
                    usage = json.loads(line[len(b"data: ") :])["usage"]
                    sample.prompt_tokens = usage["prompt_tokens"]
                    sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                else:
                    sample.tokens.append(now)
            elif not sample.status:
                sample.status = int(line.split()[1])
            elif line.startswith(END):
                self._finish()
        if sample.status not in (0, 200):
            self.end = (self.end + data)[-MOST_SHOWN:]

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will come."""
        self._finish()

    def _finish(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _message(at: Endpoint, prompt: Sequence[int] | str, tokens: int, key: str, seed: int | None) -> bytes:
    """A request for a streamed completion of exactly so many tokens."""
    fields = {
        "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0.7,
        "stream_options": _ASK_USAGE, "seed": seed, "model": at.model,
    }  # fmt: skip
    body = json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        f"Host: {at.host}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *([f"Authorization: Bearer {key}"] if key else []),
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


async def touch(at: Endpoint, path: str) -> float:
    """Seconds until the whole answer to a GET is there, connection included. Raises SlipstreamError."""
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection(at.host, at.port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {at.host}\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
    finally:
        writer.close()
    if b" 200 " not in answer[:20]:
        raise SlipstreamError(f"{path} was answered {answer[:100]!r}")
    return time.perf_counter() - begun


def ask_minimally(at: Endpoint, prompt: Sequence[int], tokens: int, seed: int = 0) -> float:
    """Tokens a second after the first one, seen by a client that does nothing but read its socket."""
    first = last = 0.0
    tail = b""
    with socket.create_connection((at.host, at.port)) as connection:
        connection.sendall(_message(at, prompt, tokens, "", seed))
        while not tail.rstrip().endswith(END) and (data := connection.recv(1 << 16)):
            last = time.perf_counter()
            first = first or (last if START in data else 0.0)
            tail = (tail + data)[-64:]
    if not first or last == first:
        raise SlipstreamError("the stream ended without tokens")
    return (tokens - 1) / (last - first)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(samples: Sequence[Sample], answer_tokens: int) -> dict[str, Any]:
    """Throughput and latencies of requests that ran side by side, each with `answer_tokens` tokens.

    Events may hold several tokens' text or none, so tokens are counted by what was asked for.
    """
    begun, ended = min(s.sent for s in samples), max(s.tokens[-1] for s in samples)
    ttft, gaps = [s.ttft for s in samples], [gap for s in samples for gap in s.gaps] or [0.0]
    tpot = [s.whole_tpot(answer_tokens) for s in samples]
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
