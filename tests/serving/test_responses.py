"""OpenAI's responses: whole, streamed, gone on with, with tools and schemas."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.serving.conftest import KEY, Server

WEATHER: Any = {
    "type": "function", "name": "weather", "description": "The weather in a city.", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"],
                   "additionalProperties": False},
}  # fmt: skip


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def client(real_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{real_server.url}/v1", api_key=KEY, max_retries=0)


def test_a_response_and_the_next(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model="tiny", input="My name is Ada. Who are you?", instructions="Be brief.", max_output_tokens=20,
        temperature=0.0,
    )  # fmt: skip
    assert first.output_text
    assert first.usage is not None
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    again = client.responses.create(
        model="tiny", input="What is my name?", previous_response_id=first.id, max_output_tokens=10, temperature=0.0
    )
    assert again.usage is not None
    assert again.usage.input_tokens > first.usage.output_tokens + 20, "what was said before is in the prompt"
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    unkept = client.responses.create(model="tiny", input="Hello.", store=False, max_output_tokens=4)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_streamed_is_whole(client: openai.OpenAI) -> None:
    settings: Any = {"model": "tiny", "input": [{"role": "user", "content": "Say hello."}], "max_output_tokens": 16,
                     "temperature": 0.0}  # fmt: skip
    whole = client.responses.create(**settings)
    events = list(client.responses.create(**settings, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 1


def test_tools_streamed_and_whole(client: openai.OpenAI) -> None:
    settings: Any = {"model": "tiny", "input": "What is the weather in Paris?", "tools": [WEATHER], "temperature": 0.0,
                     "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 100}  # fmt: skip
    whole = client.responses.create(**settings)
    (call,) = whole.output
    assert (call.type, call.name) == ("function_call", "weather")
    assert set(json.loads(call.arguments)) == {"city"}
    events = list(client.responses.create(**settings, stream=True))
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    then = client.responses.create(
        model="tiny", previous_response_id=whole.id, max_output_tokens=8, tools=[WEATHER],
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}],
    )  # fmt: skip
    assert then.status in ("completed", "incomplete")


def test_parse(client: openai.OpenAI) -> None:
    done = client.responses.parse(
        model="tiny", input="Invent a person.", text_format=Person, max_output_tokens=200, temperature=0.0
    )
    assert isinstance(done.output_parsed, Person)


def test_what_is_refused(client: openai.OpenAI) -> None:
    for bad in (
        {"input": [{"type": "item_reference", "id": "x"}]}, {"input": "x", "background": True},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": "x", "truncation": "auto"}, {"input": 5},
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="tiny", **bad)  # type: ignore[call-overload]
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="x", previous_response_id="resp_never")
