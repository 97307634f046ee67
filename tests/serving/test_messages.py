"""Anthropic's client: messages whole and streamed, tools, and errors as it expects them."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from tests.serving.conftest import KEY, Server

WEATHER: Any = {
    "name": "weather", "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}},
                     "required": ["city"], "additionalProperties": False},
}  # fmt: skip
GREEDY = {"temperature": 0.0}
"""Newer clients have no argument for it; whoever sends it is served."""
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def client(real_server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=real_server.url, api_key=KEY, max_retries=0)


def test_a_message(client: anthropic.Anthropic) -> None:
    done = client.messages.create(model="tiny", max_tokens=12, messages=ASK, system="Be brief.", extra_body=GREEDY)
    assert done.role == "assistant"
    assert done.content[0].type == "text"
    assert done.stop_reason == "max_tokens"
    assert done.usage.output_tokens == 12
    blocks: Any = [{"role": "user", "content": [{"type": "text", "text": ASK[0]["content"]}]}]
    same = client.messages.create(
        model="tiny", max_tokens=12, messages=blocks, system=[{"type": "text", "text": "Be brief."}], extra_body=GREEDY
    )
    assert same.content == done.content
    counted = client.messages.count_tokens(model="tiny", messages=ASK, system="Be brief.")
    usage = same.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_streamed_is_whole(client: anthropic.Anthropic) -> None:
    settings: Any = {"model": "tiny", "max_tokens": 30, "messages": ASK, "extra_body": GREEDY}
    whole = client.messages.create(**settings)
    with client.messages.stream(**settings) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.content[0].text == text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    plain = client.messages.create(model="tiny", max_tokens=30, messages=ASK, extra_body=GREEDY)
    word = plain.content[0].text.split()[3]
    done = client.messages.create(model="tiny", max_tokens=30, messages=ASK, extra_body=GREEDY, stop_sequences=[word])
    assert (done.stop_reason, done.stop_sequence) == ("stop_sequence", word)
    assert word not in done.content[0].text


def test_tools_streamed_and_whole(client: anthropic.Anthropic) -> None:
    settings: Any = {
        "model": "tiny", "max_tokens": 100, "messages": ASK, "tools": [WEATHER], "extra_body": GREEDY,
        "tool_choice": {"type": "tool", "name": "weather"},
    }  # fmt: skip
    whole = client.messages.create(**settings)
    (block,) = whole.content
    assert (block.type, block.name, whole.stop_reason) == ("tool_use", "weather", "tool_use")
    assert set(block.input) == {"city"}
    with client.messages.stream(**settings) as stream:
        final = stream.get_final_message()
    assert final.content[0].input == block.input
    turns: Any = [
        *ASK, {"role": "assistant", "content": [block.model_dump(include={"type", "id", "name", "input"})]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "It rains."}]},
    ]  # fmt: skip
    then = client.messages.create(model="tiny", max_tokens=8, messages=turns, tools=[WEATHER], extra_body=GREEDY)
    assert then.usage.output_tokens > 0


@pytest.mark.parametrize("how", ["output_config", "output_format"])
def test_an_answer_keeps_to_a_schema(client: anthropic.Anthropic, how: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
    }
    wanted: Any = {"type": "json_schema", "schema": schema}
    body = GREEDY | {how: {"format": wanted} if how == "output_config" else wanted}
    done = client.messages.create(model="tiny", max_tokens=80, messages=ASK, extra_body=body)
    said = json.loads(done.content[0].text)  # type: ignore[union-attr]
    assert set(said) == {"city", "days"}
    assert said["days"] in (1, 2)
    with pytest.raises(anthropic.BadRequestError, match="json_schema"):
        client.messages.create(
            model="tiny", max_tokens=8, messages=ASK, extra_body={"output_config": {"format": {"type": "xml"}}}
        )


@pytest.mark.parametrize("field", ["mcp_servers", "container"])
def test_what_would_change_the_answer_is_not_ignored(client: anthropic.Anthropic, field: str) -> None:
    for ask in (client.messages.create, client.messages.count_tokens):
        limit = {"max_tokens": 8} if ask == client.messages.create else {}
        with pytest.raises(anthropic.BadRequestError, match=field):
            ask(model="tiny", messages=ASK, extra_body={field: ["x"]}, **limit)  # type: ignore[call-overload]


def test_errors(client: anthropic.Anthropic, real_server: Server) -> None:
    with pytest.raises(anthropic.BadRequestError, match="not supported"):
        client.messages.create(
            model="tiny", max_tokens=5,
            messages=[{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}],
        )  # fmt: skip
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="another", max_tokens=5, messages=ASK)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="tiny", max_tokens=0, messages=ASK)
    stranger = anthropic.Anthropic(base_url=real_server.url, api_key="sk-not-known-here", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="tiny", max_tokens=5, messages=ASK)
