"""Who leaves, or is late, while texts are embedded or a prompt is scored: the engine is told, and his place is free."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from slipstream.engine.messages import Stats
from slipstream.serving.app import Api
from slipstream.serving.exchange import ServerLimits
from slipstream.serving.keys import Keys
from tests.serving.test_fill_and_echo import tokenizer_with

EMBED = "/v1/embeddings", {"input": ["a", "b"]}
SCORE = "/v1/completions", {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 1}


class Client:
    """Stands for an engine that never comes to an end with what it is asked beside answers."""

    ready, healthy, stats, restarts = True, True, Stats(), 0

    def __init__(self) -> None:
        self.info = None
        self.open, self.cancelled = 0, 0
        self.asked = asyncio.Event()

    async def embed(self, prompts: list[list[int]], pooling: str, *, normalize: bool, **_: Any) -> list[bytes]:
        self.open += 1
        self.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1
        return []

    async def score(self, prompts: list[list[int]], top: int, tenant: str) -> list[Any]:
        return await self.embed(prompts, "", normalize=True)


def call(path: str, body: dict[str, Any], timeout: float, leaves: bool) -> tuple[int, Client, Api]:
    """What a request is answered; its client `leaves` once the engine was asked."""

    async def run() -> tuple[int, Client, Api]:
        client, status, data = Client(), [0], json.dumps(body).encode()
        limits = ServerLimits(request_timeout=timeout)
        api = Api(client, tokenizer_with(()), None, "tiny", Keys([]), limits)  # type: ignore[arg-type]
        said: list[dict[str, Any]] = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if said:
                return said.pop()
            await client.asked.wait()
            if not leaves:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            status[0] = message.get("status", status[0])

        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "asgi": {"version": "3.0", "spec_version": "2.3"},
        }  # fmt: skip
        await asyncio.wait_for(api.app()(scope, receive, send), 20)
        return status[0], client, api

    return asyncio.run(run())


@pytest.mark.parametrize(("path", "body"), [EMBED, SCORE])
@pytest.mark.parametrize(("leaves", "timeout", "status"), [(True, 600.0, 499), (False, 0.2, 504)])
def test_the_engine_is_told(path: str, body: dict[str, Any], leaves: bool, timeout: float, status: int) -> None:
    answered, client, api = call(path, body, timeout, leaves)
    assert (answered, client.cancelled, client.open) == (status, 1, 0)
    assert (
        f'slipstream_requests_failed_total{{model_name="tiny",status="{status}"}} 1.0' in api.metrics.render().decode()
    )
    assert api.exchange.activity.open == 0
