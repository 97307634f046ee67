"""A prompt of ten megabytes: refused by its size, or where that may be, for its tokens, in numbers and without work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import httpx
import pytest

from slipstream.serving.errors import ApiError
from slipstream.serving.prompts import Prompts
from tests.conftest import CONTEXT
from tests.serving.conftest import KEY, Server, checked

SIZE = 10 << 20
WORDS = "ab " * (SIZE // 3)
IDS = [7] * (SIZE // 2)
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "a text": ("/v1/completions", {"prompt": WORDS}, len(WORDS)),
    "token ids": ("/v1/completions", {"prompt": IDS}, len(IDS)),
    "a conversation": ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS}]}, len(WORDS)),
    "in many parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": WORDS[: SIZE // 100]}] * 99}]},
        SIZE // 100 * 99,
    ),
    "responses": ("/v1/responses", {"input": WORDS}, len(WORDS)),
    "messages": ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": WORDS}]}, len(WORDS)),
    "to be embedded": ("/v1/embeddings", {"input": WORDS}, len(WORDS)),
}
"""Where it goes, in what, and how long the server will say that it is."""


@pytest.fixture(scope="module", params=[8, 64])
def server(tiny_gguf: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Server, int]]:
    """One that takes bodies of so many megabytes: as many as by default, and far more."""
    options = () if request.param == 8 else ("--max-body-mb", str(request.param))
    with checked(tiny_gguf, "--api-key", KEY, "--threads", "1", "--kv-cache-gb", "0.01", *options) as running:
        yield running, request.param


def asked(server: Server, kind: str) -> httpx.Response:
    path, body, _ = KINDS[kind]
    with server.client() as http:
        return http.post(path, json={"model": "tiny", **body})


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_refused_in_numbers(server: tuple[Server, int], kind: str) -> None:
    running, most = server
    answer, (*_, length) = asked(running, kind), KINDS[kind]
    message = answer.json()["error"]["message"]
    if most == 8:
        assert answer.status_code == 413
        assert str(8 << 20) in message
        return
    assert answer.status_code == 400, message
    said = [int(number) for number in message.split() if number.isdigit()]
    assert length <= said[0] < length + 1000
    assert str(CONTEXT) in message


def test_others_are_answered_meanwhile(server: tuple[Server, int]) -> None:
    """While all kinds of them come in, again and again, until somebody else has had ten answers."""
    running, _ = server
    done, refused = threading.Event(), list[int]()

    def nuisance() -> None:
        while not done.is_set():
            refused.extend(asked(running, kind).status_code for kind in KINDS)

    thread = threading.Thread(target=nuisance)
    thread.start()
    try:
        with running.client() as http:
            for _ in range(10):
                answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 5})
                assert answer.status_code == 200
    finally:
        done.set()
        thread.join(60)
    assert set(refused) <= {400, 413}
    assert refused


class Idle:
    """Stands for a tokenizer that must not be asked."""

    longest_token = 12

    def encode(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("it was cut into tokens")

    render = encode_rendered = encode


class Counted(list[int]):
    """Ids of which only the number may be looked at."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("each of them was looked at")


def test_it_costs_no_work() -> None:
    """What cannot fit is neither cut into tokens nor looked through, nor does a template get to see it."""
    client = SimpleNamespace(info=SimpleNamespace(max_len=CONTEXT, vocabulary=259))
    prompts = Prompts(cast(Any, client), cast(Any, Idle()), cast(Any, object()))
    with pytest.raises(ApiError, match=f"{len(WORDS)} characters"):
        asyncio.run(prompts.of_text(WORDS, "prompt"))
    with pytest.raises(ApiError, match=f"{len(WORDS) + len('user')} characters"):
        asyncio.run(prompts.of_chat([{"role": "user", "content": WORDS}]))
    with pytest.raises(ApiError, match=f"{SIZE} tokens"):
        prompts.fits(Counted([7] * SIZE), "prompt")
