"""Timings: whatever is asked, whole or streamed, its answer says what it took, if that is asked for."""

from __future__ import annotations

import json
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.messages import RequestTimings
from tests.serving.conftest import Server

TEXT = "A sentence that is said again. " * 4
CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 20}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"ignore_eos": True},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 20, "ignore_eos": True},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 20, "ignore_eos": True},
    "/v1/messages": CHAT | {"seed": 3},
}


def asked(server: Server, path: str, **more: object) -> list[dict[str, Any]]:
    """The answer; of a stream all events that are JSON."""
    with server.client() as http:
        answer = http.post(path, json=ASKED[path] | more)
    assert answer.status_code == 200, answer.text
    if not more.get("stream"):
        return [answer.json()]
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in data]


def told(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """All timings in an answer, a response's own included."""
    places = [*events, *(event["response"] for event in events if "response" in event)]
    return [place["timings"] for place in places if "timings" in place]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_an_answer_says_what_it_took(server: Server, path: str, stream: bool) -> None:
    asked(server, path)  # so that the prompt's beginning is in the cache
    begun = time.perf_counter()
    ((timings,),) = told(asked(server, path, stream=stream, timings=True))
    wall = time.perf_counter() - begun
    assert timings.keys() == {field.name for field in fields(RequestTimings)}
    assert 1 <= timings["generated_tokens"] <= 20
    assert 64 <= timings["cached_tokens"] < timings["prompt_tokens"]
    assert timings["queue_seconds"] >= 0
    assert timings["prefill_seconds"] > 0
    assert timings["decode_seconds"] > 0
    assert timings["queue_seconds"] + timings["prefill_seconds"] + timings["decode_seconds"] <= wall
    assert timings["preemptions"] == 0
    assert 0 < timings["ceiling_fraction"] < 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_nothing_is_told_unasked(server: Server, path: str, stream: bool) -> None:
    assert not told(asked(server, path, stream=stream))
    assert not told(asked(server, path, stream=stream, timings=False))


def test_every_key_is_in_the_manual() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    assert not [field.name for field in fields(RequestTimings) if f"`{field.name}`" not in manual]
