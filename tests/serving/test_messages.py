"""Anthropic's client: messages whole and streamed, tools, and errors as it expects them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest

from slipstream.serving.errors import ApiError
from slipstream.serving.keys import hashed
from slipstream.serving.messages import error_body
from tests.serving.conftest import KEY, Server, start, stop

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
    with pytest.raises(anthropic.AuthenticationError, match="a valid API key is needed") as refused:
        stranger.messages.create(model="tiny", max_tokens=5, messages=ASK)
    assert kind_of(refused.value) == "authentication_error"


def kind_of(error: anthropic.APIStatusError) -> str:
    """What kind of error the body says it is."""
    body: Any = error.body
    assert body["type"] == "error"
    return str(body["error"]["type"])


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages", 401, "authentication_error"), ("POST", "/v1/messages/x", 401, "authentication_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"), ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages", 413, "request_too_large"),
        ("GET", "/v1/messages/count_tokens", 405, "invalid_request_error"),
    ],
)  # fmt: skip
def test_what_is_refused_at_the_door_has_their_shape(
    real_server: Server, method: str, path: str, status: int, kind: str
) -> None:
    content = b" " * (9 << 20) if status == 413 else b"{}"
    with real_server.client() as http:
        known = {} if status != 401 else {"Authorization": "Bearer a-stranger", "x-api-key": "a-stranger"}
        answer = http.request(method, path, content=content, headers=known)
        other = http.request(method, path.replace("messages", "others"), headers=known)
    assert answer.status_code == status
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["error"].keys() == {"type", "message"}
    assert other.json()["error"].keys() == {"message", "type", "param", "code"}, (
        "OpenAI's clients are answered in theirs"
    )


def test_what_a_key_may_not_has_their_shape(tiny_gguf: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"slow": {"sha256": hashed(KEY).hex(), "requests_per_minute": 1}}))
    limited = start(tiny_gguf, "--api-keys-file", str(keys), "--threads", "1", "--kv-cache-gb", "0.01")
    try:
        hurried = anthropic.Anthropic(base_url=limited.url, api_key=KEY, max_retries=0)
        hurried.messages.create(model="tiny", max_tokens=2, messages=ASK)
        with pytest.raises(anthropic.RateLimitError, match="requests a minute") as refused:
            hurried.messages.create(model="tiny", max_tokens=2, messages=ASK)
        assert kind_of(refused.value) == "rate_limit_error"
    finally:
        stop(limited)
    never = json.loads(error_body(ApiError(403, "this key may not", "permission_error")))
    assert never == {"type": "error", "error": {"type": "permission_error", "message": "this key may not"}}
