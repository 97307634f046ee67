"""Exchanges end with their clients: before the first token, between two tokens, for one prompt and for several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request

from slipstream.engine.messages import RequestTimings
from slipstream.engine.output import Chunk
from slipstream.program.sampling import SamplingParams
from slipstream.serving.answers import CompletionAnswer
from slipstream.serving.errors import ApiError
from slipstream.serving.exchange import Exchange, ServerLimits, Wanted
from slipstream.serving.keys import MOST_PRIORITY, Key
from slipstream.serving.metrics import Metrics


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
        assert key.running == 1
        with pytest.raises(ApiError, match="at once"):
            await exchange.run(caller.request, key, wanted, answer(prompts))
        caller.gone.set()
        await until(lambda: client.open == 0)
        await until(lambda: key.running == 0)
        await asyncio.wait_for(task, 5)

    asyncio.run(run())


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
