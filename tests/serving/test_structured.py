"""Structured answers through the server: they keep to what was asked, streamed or whole; bad schemas end in a 400."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest

from slipstream.bench.bombs import BACKTRACKING, BOMBS, under_another_name
from slipstream.engine.desk import MOST_SECONDS
from slipstream.engine.grammar import Grammars
from slipstream.errors import UsageError
from slipstream.models import read_config
from slipstream.serving.errors import ApiError
from slipstream.serving.structured import form_of
from slipstream.text import load_tokenizer
from slipstream.text.grammars import of_choice
from slipstream.weights.open import open_checkpoint
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
def test_a_schema_is_kept_to_streamed_or_whole(client: openai.OpenAI, real_server: Server) -> None:
    settings: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 60, "seed": 5, "temperature": 0.8}
    settings |= {"response_format": schema_format(PERSON), "extra_headers": {"X-Slipstream-Tag": "person"}}
    client.chat.completions.create(**settings, n=2)  # what was said once is drafted when it is to be said again
    whole = client.chat.completions.create(**settings, n=2)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content or "")
        assert set(value) == {"name", "age"}
        assert 1 <= value["age"] <= 99
    events = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole.choices[0].message.content
    drafted = 'slipstream_accepted_tokens_total{drafter="suffix",model_name="tiny",tag="person"}'
    for again in range(100):  # the engine is asked for its figures every now and then
        if again % 10 == 9:  # beside a busy process it may not have paid
            client.chat.completions.create(**settings)
        with real_server.client() as http:
            count = float(http.get("/metrics").text.partition(drafted)[2].partition("\n")[0] or 0)
        if count:
            return
        time.sleep(0.1)
    raise AssertionError("only what the grammar leaves no choice about was drafted")


@pytest.mark.features("grammar", "n", "logprobs", "stop", "streaming", "text drafts", "sampling")
def test_what_else_is_asked_for_changes_nothing(client: openai.OpenAI) -> None:
    """Several answers, log-probabilities, streams, stops and a bound: text and reason are those of the plain one."""
    settings: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 60, "seed": 11, "temperature": 0.8}
    settings |= {"response_format": schema_format(PERSON)}
    plain = client.chat.completions.create(**settings).choices[0]
    text = plain.message.content or ""
    assert (plain.finish_reason, set(json.loads(text))) == ("stop", {"name", "age"})
    more = settings | {"n": 3, "logprobs": True, "top_logprobs": 2}
    whole = {choice.index: choice for choice in client.chat.completions.create(**more).choices}
    assert (whole[0].message.content, whole[0].finish_reason) == (text, "stop")
    streamed: dict[int, list[Any]] = {index: [] for index in whole}
    for event in client.chat.completions.create(**more, stream=True):
        for choice in event.choices:
            streamed[choice.index].append(choice)
    for index, events in streamed.items():
        assert "".join(event.delta.content or "" for event in events) == whole[index].message.content
        assert [event.finish_reason for event in events if event.finish_reason] == [whole[index].finish_reason]
        said = [token for event in events if event.logprobs for token in event.logprobs.content or ()]
        expected = whole[index].logprobs
        assert expected is not None
        assert said == expected.content
    cut = client.chat.completions.create(**settings, stop=['"age']).choices[0]
    assert (cut.message.content, cut.finish_reason) == (text.partition('"age')[0], "stop")
    short = client.chat.completions.create(**settings | {"max_tokens": 6}).choices[0]
    assert short.finish_reason == "length"
    assert text.startswith(short.message.content or "x")


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


ALLOWED = {
    "^(a+)+$": ("a*", "a+"), "^(a|a)*$": ("a*", "a*"), "^((a{1,30}){1,30}){1,30}$": ("a*", "a{1,27000}"),
    "^(([a-z])+.)+[A-Z]([a-z])+$": ("([a-z].*)?", "[a-z].*[A-Z][a-z]+"), "^(a|aa)+b?$": ("a*b?", "a+b?"),
}  # fmt: skip
"""By pattern: plain ones for what an answer begins with, and what it is."""
HARMLESS = {"exponential", *(name for name in BOMBS if name.startswith("backtracking"))}
"""What can be kept to after all."""
ANSWERS = HARMLESS | {name for name in BOMBS if name.startswith("near")}
"""So can these; as a tool's they make the prompt, which shows them, too long."""
TOOLS = HARMLESS | {"a circle"}
"""There it leads to what is around it, which can do without."""
TRIES = 3
"""Seconds and pauses are those of the best: other work on the machine comes and goes, what is wrong is always so."""


def compiling(schema: Any, tokens: Grammars) -> tuple[float, float, float]:
    """CPU seconds that a schema takes on a thread of its own, those by the clock, and the longest pause of this one."""
    ended, spent = threading.Event(), []

    def compile_it() -> None:
        begun = time.thread_time()
        try:
            tokens.learn(form_of(None, None, {"json": schema}).grammar)
        except (UsageError, ApiError):
            pass
        finally:
            spent.append(time.thread_time() - begun)
            ended.set()

    begun = last = time.monotonic()
    threading.Thread(target=compile_it).start()
    over, pause = False, 0.0
    while not over:
        over = ended.wait(0.0005)
        pause, last = max(pause, time.monotonic() - last), time.monotonic()
    return spent[0], time.monotonic() - begun, pause


def test_compiling_ends_soon_and_lets_others_run(smollm: Path) -> None:
    """Counted in CPU seconds, which other work on the machine does not lengthen: none comes near what the desk allows.

    The desk would give up the request anyway, but not the thread. Nor does a compiler hold the interpreter, in which
    the engine's loop runs. That the loop does not wait for the thread is shown in tests/engine/test_worker.py.
    """
    assert MOST_SECONDS == 2.0
    checkpoint = open_checkpoint(smollm)
    grammars = Grammars(load_tokenizer(checkpoint), read_config(checkpoint).vocabulary)
    grammars.learn(of_choice(["x"]))  # the vocabulary's own work is done once
    for name, schema in BOMBS.items():
        tries = [compiling(under_another_name(schema, number), grammars) for number in range(TRIES)]
        assert min(cpu for cpu, _, _ in tries) < MOST_SECONDS / 2, name
        assert min(pause / max(took, 0.2) for _, took, pause in tries) < 0.5, name


def asked(place: str, schema: Any) -> tuple[str, Any]:
    """A route, and a request to it that asks for a schema."""
    chat = {"model": "tiny", "messages": ASK, "max_tokens": 4}
    parameters = {"type": "object", "properties": {"x": schema}}
    form = {"type": "json_schema", "name": "it", "schema": schema}
    match place:
        case "chat":
            return "/v1/chat/completions", chat | {"guided_json": schema}
        case "tool":
            tool = {"type": "function", "function": {"name": "bomb", "parameters": parameters}}
            return "/v1/chat/completions", chat | {"tools": [tool], "tool_choice": "required"}
        case "completions":
            return "/v1/completions", {"prompt": "x", "max_tokens": 4, "guided_json": schema}
        case "responses":
            return "/v1/responses", {"input": "x", "max_output_tokens": 4, "text": {"format": form}}
        case _:
            return "/v1/messages", chat | {"output_config": {"format": form}}


def beside_a_stream(server: Server, path: str, body: Any) -> tuple[httpx.Response, float, float]:
    """An answer, the seconds it took, and the longest pause of a stream that went on meanwhile."""
    gaps: list[float] = []

    def stream() -> None:
        beside = {"prompt": "Once upon", "max_tokens": 60, "stream": True, "ignore_eos": True}
        with server.client() as http, http.stream("POST", "/v1/completions", json=beside) as events:
            last = 0.0
            for line in events.iter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    gaps.append(now - last if last else 0.0)
                    last = now

    beside = threading.Thread(target=stream)
    beside.start()
    begun = time.monotonic()
    with server.client() as http:
        answer = http.post(path, json=body)
    took = time.monotonic() - begun
    beside.join()
    assert len(gaps) > 20
    return answer, took, max(gaps)


@pytest.mark.parametrize("place", ["chat", "tool", "completions", "responses", "messages"])
@pytest.mark.parametrize("name", sorted(BOMBS))
def test_schema_bombs_end_soon_and_slow_nobody(real_server: Server, name: str, place: str) -> None:
    """In a 400 that says what is wrong, or in an answer, wherever a schema can be said; whoever streams goes on.

    A request takes no longer than the desk allows, from end to end, and nobody waits for a good part of that.
    """
    harmless = TOOLS if place == "tool" else ANSWERS
    for number in range(TRIES):
        schema = under_another_name(BOMBS[name], f"{place} {number}")
        answer, took, pause = beside_a_stream(real_server, *asked(place, schema))
        if "takes longer than" in answer.text:  # given up by the clock: beside a busy process that says nothing
            continue
        assert answer.status_code == (200 if name in harmless else 400), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert len(answer.json()["error"]["message"]) < 600
        if took < MOST_SECONDS and pause < MOST_SECONDS / 4:
            return
    raise AssertionError(f"answered in {took:.1f} s, others paused for {pause:.1f} s")


@pytest.mark.parametrize("ask", ["guided_regex", "schema"])
@pytest.mark.parametrize("pattern", BACKTRACKING)
def test_patterns_that_others_choke_on_are_kept_to(client: openai.OpenAI, pattern: str, ask: str) -> None:
    """They are automata here: used as they are, with an answer that they allow, as far as it goes."""
    begun, whole = ALLOWED[pattern]
    form: Any = (
        {"guided_regex": pattern} if ask == "guided_regex" else {"guided_json": BOMBS[f"backtracking: {pattern}"]}
    )
    done = client.completions.create(model="tiny", prompt="aaaa", max_tokens=40, seed=1, extra_body=form)
    text, ended = done.choices[0].text, done.choices[0].finish_reason
    if ask == "schema":
        text = json.loads(text) if ended == "stop" else text.removeprefix('"')
    assert re.fullmatch(whole if ended == "stop" else begun, text), (text, ended)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"shape": "round"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"), ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
    ],
)  # fmt: skip
def test_what_is_refused_names_its_field(real_server: Server, body: Any, field: str) -> None:
    with real_server.client() as http:
        answer = http.post("/v1/chat/completions", json={"model": "tiny", "messages": ASK, "max_tokens": 4, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


ENDLESS: Any = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
"""A schema that only the engine finds out to be none that can be kept to."""


def tool(name: str, schema: Any, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


FORM = {"type": "json_schema", "name": "it", "schema": ENDLESS}
GOOD = tool("good", {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False})
BAD = tool("bad", ENDLESS)
PLAIN_BAD = {"type": "function", "name": "bad", "parameters": ENDLESS}
THEIR_BAD = {"name": "bad", "input_schema": ENDLESS}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("chat/completions", {"guided_regex": "("}, "guided_regex"),
        ("chat/completions", {"guided_grammar": "start: ("}, "guided_grammar"),
        ("chat/completions", {"guided_json": ENDLESS}, "guided_json"),
        ("chat/completions", {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ("chat/completions", {"response_format": schema_format(ENDLESS)}, "response_format"),
        ("chat/completions", {"tools": [BAD], "tool_choice": "required"}, "tools[0].function.parameters"),
        ("chat/completions", {"tools": [GOOD, BAD], "tool_choice": {"type": "function", "function": {"name": "bad"}}},
         "tools[1].function.parameters"),
        ("chat/completions", {"tools": [GOOD, BAD], "tool_choice": "required"}, "tools"),
        ("completions", {"guided_regex": "("}, "guided_regex"),
        ("completions", {"response_format": schema_format(ENDLESS)}, "response_format"),
        ("responses", {"text": {"format": FORM}}, "text.format"),
        ("responses", {"guided_json": ENDLESS}, "guided_json"),
        ("responses", {"tools": [PLAIN_BAD], "tool_choice": "required"}, "tools[0].parameters"),
        ("messages", {"output_config": {"format": FORM}}, "output_config.format"),
        ("messages", {"output_format": FORM}, "output_format"),
        ("messages", {"tools": [THEIR_BAD], "tool_choice": {"type": "any"}}, "tools[0].input_schema"),
    ],
)  # fmt: skip
def test_what_the_engine_refuses_names_its_field(
    real_server: Server, path: str, body: Any, field: str, stream: bool
) -> None:
    """Found out by compiling, after the request was read: it is told by the name that this client knows."""
    needed: Any = {
        "chat/completions": {"messages": ASK}, "completions": {"prompt": "x"}, "responses": {"input": "x"},
        "messages": {"messages": ASK, "max_tokens": 4},
    }  # fmt: skip
    with real_server.client() as http:
        answer = http.post(f"/v1/{path}", json={**needed[path], **body, "stream": stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith(f"{field}: "), error
    assert "param" not in error if path == "messages" else error["param"] == field
