"""Exchanges end with their clients: before the first token, between two tokens, for one prompt and for several."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.requests import Request

from slipstream.engine.messages import RequestTimings
from slipstream.engine.output import Chunk
from slipstream.program.sampling import SamplingParams
from slipstream.serving.answers import CompletionAnswer
from slipstream.serving.errors import GONE, ApiError
from slipstream.serving.exchange import Exchange, ServerLimits, Wanted
from slipstream.serving.keys import MOST_PRIORITY, Key, Keys
from slipstream.serving.metrics import Metrics
from slipstream.serving.tracing import Tracing


class Client:
    """Stands for an engine: says `said` tokens of every answer, then nothing for ever."""

    ready = True

    def __init__(self, said: int):
        self.said, self.open, self.terms = said, 0, list[Any]()

    async def generate(self, tokens: list[int], params: Any, terms: Any) -> AsyncIterator[Any]:
        self.open += 1
        self.terms.append(terms)
        try:
            for _ in range(self.said):
                yield [Chunk(0, 0, "x", (1,))], None
            await asyncio.Event().wait()
            yield [], RequestTimings(1, 0, 1, 0.0, 0.0, 0.0, 0, 0.0)
        finally:
            self.open -= 1


class Caller:
    """A request whose client goes away when it is told to."""

    def __init__(self) -> None:
        self.gone, self.sent = asyncio.Event(), list[bytes]()
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b"",
                 "asgi": {"spec_version": "2.3"}}  # fmt: skip
        self.request = Request(scope, self.receive)

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message.get("body", b""))


def answer(count: int) -> CompletionAnswer:
    return CompletionAnswer("a", "m", None, count)  # type: ignore[arg-type]


async def until(condition: Any) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not come to that")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("said", [0, 2])
def test_whoever_leaves_is_not_worked_for(stream: bool, prompts: int, said: int) -> None:
    """The engine is told at once, whether anything was said or not, and the key has its place again."""

    async def run() -> None:
        client, caller, key = Client(said), Caller(), Key("k", b"", max_concurrent=1)
        exchange = Exchange(client, ServerLimits(), Metrics("m", _Nothing()))  # type: ignore[arg-type]
        wanted = Wanted([([1], SamplingParams())] * prompts, stream=stream)

        async def serve() -> None:
            response = await exchange.run(caller.request, key, wanted, answer(prompts))
            await response(caller.request.scope, caller.receive, caller.send)

        task = asyncio.create_task(serve())
        await until(lambda: client.open == prompts)
        await until(lambda: not (stream and said) or len(caller.sent) > prompts * said)
        assert (key.running, key.held) == (1, prompts)
        with pytest.raises(ApiError, match="at once"):
            await exchange.run(caller.request, key, wanted, answer(prompts))
        caller.gone.set()
        await until(lambda: client.open == 0)
        await until(lambda: (key.running, key.held) == (0, 0))
        await asyncio.wait_for(task, 5)

    asyncio.run(run())


def test_a_stream_that_nobody_reads_ends() -> None:
    """Its client may leave between the first token and the response's beginning."""

    async def run() -> None:
        client, caller, key = Client(1), Caller(), Key("k", b"")
        exchange = Exchange(client, ServerLimits(), Metrics("m", _Nothing()))  # type: ignore[arg-type]
        response = await exchange.run(
            caller.request, key, Wanted([([1], SamplingParams())], stream=True), answer(1)
        )  # fmt: skip
        assert (client.open, key.running) == (1, 1)
        del response
        gc.collect()
        await until(lambda: client.open == 0)
        await until(lambda: key.running == 0)

    asyncio.run(run())


def test_how_requests_end_is_in_their_spans() -> None:
    """Those that are refused, and those whose client leaves, too."""

    async def run() -> None:
        memory, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(memory))
        metrics = Metrics("m", _Nothing())  # type: ignore[arg-type]
        exchange = Exchange(Client(2), ServerLimits(max_queue=2), metrics)  # type: ignore[arg-type]
        exchange.tracing = Tracing.over(provider)

        async def left(stream: bool) -> None:
            caller = Caller()
            wanted = Wanted([([1], SamplingParams())], stream=stream)

            async def serve() -> None:
                response = await exchange.run(caller.request, Key("k", b""), wanted, answer(1))
                await response(caller.request.scope, caller.receive, caller.send)

            task = asyncio.create_task(serve())
            await asyncio.sleep(0.05)
            caller.gone.set()
            await asyncio.wait_for(task, 5)

        await left(stream=True)
        await left(stream=False)
        with pytest.raises(ApiError, match="at most 2 prompts"):
            await exchange.run(
                Caller().request, Key("k", b""), Wanted([([1], SamplingParams())] * 3), answer(3)
            )  # fmt: skip
        await until(lambda: len(memory.get_finished_spans()) == 3)
        spans = memory.get_finished_spans()
        assert [span.status.status_code.name for span in spans] == ["ERROR"] * 3
        assert [span.status.description for span in spans[:2]] == [GONE, GONE]
        assert "at most 2 prompts" in (spans[2].status.description or "")
        assert b'slipstream_requests_failed_total{model_name="m",status="499"} 2.0' in metrics.render()

    asyncio.run(run())


@pytest.mark.parametrize(("count", "places"), [(2, 8), (3, 8), (4, 512), (10, 512), (3, 4), (40, 8)])
def test_nobody_fills_the_queue(count: int, places: int) -> None:
    """However much the others want, there is room for a key that has nothing in it, as far as half of it goes."""
    keys = [Key(str(n), b"") for n in range(count)]
    Keys(keys)
    with contextlib.ExitStack() as stack:
        for key in keys[: places // 2]:
            while key.held < key.room(places):
                stack.enter_context(key.admitted(1, places))
            assert key.held
            with pytest.raises(ApiError, match=f"of the queue's {places}") as error, key.admitted(1, places):
                pass
            refused = error.value.response()
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert json.loads(bytes(refused.body))["error"]["code"] == "rate_limit_exceeded"
        assert sum(key.held for key in keys) <= places
    assert not any(key.held or key.running for key in keys)


@pytest.mark.parametrize("count", [1, 3])
def test_a_queue_that_is_full(count: int) -> None:
    """Whoever comes then is sent away, whose ever the places are, until one is free; nothing is held for them."""

    async def run() -> None:
        client, keys = Client(0), [Key(str(n), b"") for n in range(count)]
        Keys(keys)
        exchange = Exchange(client, ServerLimits(max_queue=4), Metrics("m", _Nothing()))  # type: ignore[arg-type]

        async def ask(caller: Caller, key: Key, prompts: int) -> int:
            wanted = Wanted([([1], SamplingParams())] * prompts)
            return (await exchange.run(caller.request, key, wanted, answer(prompts))).status_code

        first, second, later = Caller(), Caller(), Caller()
        tasks = [asyncio.create_task(ask(first, keys[0], 2)), asyncio.create_task(ask(second, keys[count // 2], 2))]
        await until(lambda: client.open == 4)
        with pytest.raises(ApiError, match="4 requests are open, the limit is 4") as error:
            await ask(Caller(), keys[-1], 1)
        refused = error.value.response()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert json.loads(bytes(refused.body))["error"] == {
            "message": error.value.message, "type": "rate_limit_error", "param": None, "code": "queue_full"
        }  # fmt: skip
        assert (client.open, sum(key.held for key in keys)) == (4, 4)
        first.gone.set()
        assert await tasks[0] == 499
        later.gone.set()
        assert await ask(later, keys[-1], 1) == 499, "it was let in, and left"
        second.gone.set()
        assert await tasks[1] == 499
        assert (client.open, sum(key.held for key in keys)) == (0, 0)

    asyncio.run(run())


def test_who_is_alone_may_have_all() -> None:
    for key in (Keys([]).find(None), Key("alone", b"")):
        with key.admitted(8, 8):
            assert (key.most(8), key.room(8)) == (8, 8)


def test_nobody_pushes_in() -> None:
    """A key may only be as urgent as it is allowed to be; that is said before anything is done."""

    async def run() -> None:
        client, caller = Client(0), Caller()
        exchange = Exchange(client, ServerLimits(), Metrics("m", _Nothing()))  # type: ignore[arg-type]
        for key, priority in ((Key("k", b""), -1), (Key("k", b"", min_priority=-3), -4), (Key("k", b""), 101)):
            with pytest.raises(ApiError, match="priority must be from") as error:
                await exchange.run(caller.request, key, Wanted([([1], SamplingParams())], priority=priority), answer(1))
            assert (error.value.status, error.value.param) == (400, "priority")
        caller.gone.set()
        for key, priority in ((Key("k", b""), MOST_PRIORITY), (Key("k", b"", min_priority=-3), -3)):
            await exchange.run(caller.request, key, Wanted([([1], SamplingParams())], priority=priority), answer(1))
        assert [terms.priority for terms in client.terms] == [MOST_PRIORITY, -3]

    asyncio.run(run())


class _Nothing:
    """No figures of an engine."""

    def collect(self) -> list[Any]:
        return []
