"""Exchanges end with their clients: before the first token, between two tokens, for one prompt and for several."""

from __future__ import annotations

import asyncio
import gc
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
from slipstream.serving.errors import ApiError
from slipstream.serving.exchange import GONE, Exchange, ServerLimits, Wanted
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
        client, caller, key = Client(said), Caller(), Key("k", b"", max_concurrent=prompts)
        exchange = Exchange(client, ServerLimits(), Metrics("m", _Nothing()))  # type: ignore[arg-type]
        wanted = Wanted([([1], SamplingParams())] * prompts, stream=stream)

        async def serve() -> None:
            response = await exchange.run(caller.request, key, wanted, answer(prompts))
            await response(caller.request.scope, caller.receive, caller.send)

        task = asyncio.create_task(serve())
        await until(lambda: client.open == prompts)
        await until(lambda: not (stream and said) or len(caller.sent) > prompts * said)
        assert key.running == prompts
        with pytest.raises(ApiError, match="at once"):
            await exchange.run(caller.request, key, wanted, answer(prompts))
        caller.gone.set()
        await until(lambda: client.open == 0)
        await until(lambda: key.running == 0)
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
        with pytest.raises(ApiError, match="the limit is 2"):
            await exchange.run(
                Caller().request, Key("k", b""), Wanted([([1], SamplingParams())] * 3), answer(3)
            )  # fmt: skip
        await until(lambda: len(memory.get_finished_spans()) == 3)
        spans = memory.get_finished_spans()
        assert [span.status.status_code.name for span in spans] == ["ERROR"] * 3
        assert [span.status.description for span in spans[:2]] == [GONE, GONE]
        assert "the limit is 2" in (spans[2].status.description or "")
        assert b'slipstream_requests_failed_total{model_name="m",status="499"} 2.0' in metrics.render()

    asyncio.run(run())


def test_nobody_fills_the_queue() -> None:
    """There is room for a key that has nothing in it, however much the others want."""
    keys = [Key(name, b"") for name in "abc"]
    Keys(keys)
    a, b, c = keys
    with a.admitted(4, 8):
        with pytest.raises(ApiError, match="4 of the queue's 8") as error, a.admitted(1, 8):
            pass
        assert error.value.status == 429
        with b.admitted(2, 8):
            assert (a.share(8), b.share(8), c.share(8)) == (3, 3, 3)
            with c.admitted(2, 8):
                pass
    alone = Key("alone", b"")
    Keys([alone])
    with alone.admitted(8, 8):
        pass
    with Keys([]).find(None).admitted(8, 8):
        pass


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
