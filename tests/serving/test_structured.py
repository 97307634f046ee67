"""Structured answers through the server: they keep to what was asked, streamed or whole; bad schemas end in a 400."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any

import openai
import pydantic
import pytest

from tests.serving.conftest import KEY, Server

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12},
                   "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
ASK: list[Any] = [{"role": "user", "content": "Invent a person."}]


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def client(real_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{real_server.url}/v1", api_key=KEY)


def schema_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


@pytest.mark.features("grammar", "n", "text drafts", "sampling")
@pytest.mark.features("grammar", "streaming", "text drafts", "sampling")
def test_a_schema_is_kept_to_streamed_or_whole(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 60, "seed": 5, "temperature": 0.8}
    whole = client.chat.completions.create(**settings, response_format=schema_format(PERSON), n=2)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content or "")
        assert set(value) == {"name", "age"}
        assert 1 <= value["age"] <= 99
    events = client.chat.completions.create(**settings, response_format=schema_format(PERSON), stream=True)
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole.choices[0].message.content


def test_parse(client: openai.OpenAI) -> None:
    """OpenAI's client makes the schema from a class, and an instance from the answer."""
    done = client.chat.completions.parse(model="tiny", messages=ASK, response_format=Person, max_tokens=200, seed=3)
    assert isinstance(done.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("body", "matches"),
    [
        ({"response_format": {"type": "json_object"}}, None),
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, "[0-9]{3}-[a-f]{2}"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"), ({"guided_regex": "a{2}b"}, "aab"),
        ({"guided_choice": ["left", "right"]}, "left|right"), ({"guided_json": {"enum": [1, 2]}}, "1|2"),
        ({"guided_json": json.dumps({"const": "x"})}, '"x"'), ({"guided_grammar": 'start: "go" /[0-9]/'}, "go[0-9]"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
    ],
)  # fmt: skip
def test_every_way_to_ask(client: openai.OpenAI, body: Any, matches: str | None) -> None:
    done = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=80, temperature=0.0, extra_body=body
    )  # fmt: skip
    text = done.choices[0].message.content or ""
    if matches is not None:
        assert re.fullmatch(matches, text), text
    elif done.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert text.startswith("{")


def test_completions_too(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model="tiny", prompt="The colour is", max_tokens=20, extra_body={"guided_choice": [" red", " green"]}
    )  # fmt: skip
    assert done.choices[0].text in (" red", " green")


def nested(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


BOMBS: dict[str, Any] = {
    "deep": nested(300), "wide": {"enum": [f"value {n}" for n in range(60_000)]},
    "no reference": {"$ref": "#/$defs/nowhere"}, "a circle": {"$ref": "#"},
    "a circle of two": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "a bad type": {"type": "strange"}, "a bad pattern": {"type": "string", "pattern": "("},
    "a pattern that is none": {"type": "string", "pattern": 5}, "brackets": {"type": "string", "pattern": "(" * 4000},
    "exponential": {"type": "string", "pattern": "((((a{1,999}){1,999}){1,999}){1,999})"},
    "lookahead": {"type": "string", "pattern": "(?=a)b"}, "no schema": [1, 2], "a text": "not JSON",
    "a long pattern": {"type": "string", "pattern": "a" * 100_000},
    "all at once": {"allOf": [{"anyOf": [{"minLength": n}, {"maxLength": n}]} for n in range(40)]},
    "near the bounds: objects": {
        "type": "object",
        "properties": {f"property_{n}": {"type": "string", "pattern": "[a-z]{1,60}"} for n in range(1500)},
    },
    "near the bounds: choices": {
        "anyOf": [{"type": "object", "properties": {f"k{n}": {"enum": ["a", "b"]}}, "required": [f"k{n}"]}
                  for n in range(1200)],
    },
    "near the bounds: texts": {"enum": [f"value {n}" for n in range(9000)]},
}  # fmt: skip


HARMLESS = {"a circle", "a circle of two", "exponential", *(name for name in BOMBS if name.startswith("near"))}
"""What can be kept to after all."""


@pytest.mark.parametrize("place", ["answer", "tool"])
@pytest.mark.parametrize("name", sorted(BOMBS))
def test_schema_bombs_end_soon_and_slow_nobody(real_server: Server, name: str, place: str) -> None:
    """In a 400 that says what is wrong, as a form of the answer or of a tool's arguments; whoever streams goes on."""
    body: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 4}
    if place == "answer":
        body["guided_json"] = BOMBS[name]
    else:
        function = {"name": "bomb", "parameters": {"type": "object", "properties": {"x": BOMBS[name]}}}
        body |= {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    gaps: list[float] = []

    def stream() -> None:
        beside = {"prompt": "Once upon", "max_tokens": 60, "stream": True, "ignore_eos": True}
        with real_server.client() as http, http.stream("POST", "/v1/completions", json=beside) as events:
            last = 0.0
            for line in events.iter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    gaps.append(now - last if last else 0.0)
                    last = now

    beside = threading.Thread(target=stream)
    beside.start()
    begun = time.monotonic()
    with real_server.client() as http:
        answer = http.post("/v1/chat/completions", json=body)
    took = time.monotonic() - begun
    beside.join()
    assert took < 20.0, f"{took:.1f} s"
    assert len(gaps) > 20
    assert max(gaps) < 5.0
    assert answer.status_code in (200, 400)
    assert answer.status_code == 400 or name in HARMLESS, answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert len(answer.json()["error"]["message"]) < 600


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"shape": "round"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"), ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "("}, "response_format"), ({"guided_grammar": "start: ("}, "response_format"),
    ],
)  # fmt: skip
def test_what_is_refused_names_its_field(real_server: Server, body: Any, field: str) -> None:
    with real_server.client() as http:
        answer = http.post("/v1/chat/completions", json={"model": "tiny", "messages": ASK, "max_tokens": 4, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
