"""Parsers of thoughts and calls: what they find, that nothing is lost, and that no cut of the text matters."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.text.parsers import REASONING, TOOLS, CallArguments, CallBegins, Event, OutputParser, Said, Thought
from slipstream.text.parsers.events import merged

NAMES = ("weather", "time")
ARGUMENTS = '{"city": "Par\\"is }", "days": [1, {"a": "]"}]}'
WEATHER = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
LATE = f'{{"parameters": {ARGUMENTS}, "type": "function", "name": "weather"}}'
CALL: list[Event] = [CallBegins("weather"), CallArguments(ARGUMENTS)]
TIME: list[Event] = [CallBegins("time"), CallArguments("{}")]

FOUND: list[tuple[str, str, list[Event]]] = [
    ("hermes", "Just text.\n ", [Said("Just text.\n ")]),
    ("hermes", f"I look.\n<tool_call>\n{WEATHER}\n</tool_call>", [Said("I look."), *CALL]),
    ("hermes", f"<tool_call>{LATE}</tool_call>\n<tool_call>{{\"name\": \"time\"}}</tool_call>\nDone.",
     [*CALL, *TIME, Said("\nDone.")]),
    ("hermes", f"<tool_call>\n{WEATHER}", CALL),
    ("hermes", "<tool_call>no JSON</tool_call> x", [Said("<tool_call>no JSON</tool_call> x")]),
    ("hermes", "<tool_call> {\"name\": \"other\", \"arguments\": {}}", [
        Said("<tool_call> {\"name\": \"other\", \"arguments\": {}}")]),
    ("hermes", "a <tool_ca b <tool_call", [Said("a <tool_ca b <tool_call")]),
    ("hermes", "<tool_call>{\"name\": \"time\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>",
     [CallBegins("time"), CallArguments('{"a": 1}')]),
    ("hermes", "<tool_call>{\"name\": \"time\", \"arguments\": {\"a\": 1",
     [CallBegins("time"), CallArguments('{"a": 1')]),
    ("hermes", WEATHER, CALL),
    ("hermes", f"```json\n{WEATHER}\n```", CALL),
    ("hermes", f"```\n{WEATHER}\n```\n<tool_call>{{\"name\": \"time\"}}</tool_call>", [*CALL, *TIME]),
    ("hermes", "```json\n{\"name\": \"other\"}\n```", [Said("```json\n{\"name\": \"other\"}\n```")]),
    ("hermes", "```js", [Said("```js")]),
    ("json", f" ```json\n[{WEATHER},\n {LATE}]\n``` Done.", [*CALL, *CALL, Said("Done.")]),
    ("json", f"```{WEATHER}``", [*CALL, Said("``")]),
    ("llama3", "It is ten.", [Said("It is ten.")]),
    ("llama3", WEATHER, CALL),
    ("llama3", f"<|python_tag|>{LATE}; {WEATHER}", [*CALL, *CALL]),
    ("llama3", '{"name": "Alice", "age": 3}\n', [Said('{"name": "Alice", "age": 3}\n')]),
    ("llama3", '{"name": "time"}', [Said('{"name": "time"}')]),
    ("llama3", "<|python_tag|>print(1)", [Said("<|python_tag|>print(1)")]),
    ("json", f"[{WEATHER}, {LATE}]", [*CALL, *CALL]),
    ("json", "[1, 2]", [Said("[1, 2]")]),
    ("json", f" \n{WEATHER} and", [*CALL, Said("and")]),
    ("mistral", f"[TOOL_CALLS][{WEATHER}, {LATE}]", [*CALL, *CALL]),
    ("mistral", f"Well. [TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time[CALL_ID]abc123def[ARGS]{{}}",
     [Said("Well."), *CALL, CallBegins("time", "abc123def"), CallArguments("{}")]),
    ("mistral", f"[TOOL_CALLS]weather{ARGUMENTS}", CALL),
    ("mistral", "[TOOL_CALLS]nobody[ARGS]{}", [Said("[TOOL_CALLS]nobody[ARGS]{}")]),
    ("mistral", "[1] and [TOOL", [Said("[1] and [TOOL")]),
]  # fmt: skip
THOUGHTS: list[tuple[bool, str, list[Event]]] = [
    (False, "<think>\nHm <b>.\n</think>\n\nYes.", [Thought("Hm <b>."), Said("Yes.")]),
    (False, "No thought. <think>x</think>", [Said("No thought. <think>x</think>")]),
    (False, " <thin", [Said(" <thin")]),
    (True, "Hm.</think>Yes.", [Thought("Hm."), Said("Yes.")]),
    (True, "<think>Hm.</think>Yes.", [Thought("Hm."), Said("Yes.")]),
    (True, "Hm.", [Thought("Hm.")]),
    (False, "<think></think>Yes.", [Said("Yes.")]),
]


def read(parser: OutputParser, pieces: Iterator[str] | list[str]) -> list[Event]:
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return merged([*events, *parser.finish()])


def cuts(text: str) -> Iterator[list[str]]:
    """Every way to cut a short text; of a long one all ways into up to three pieces, and single characters."""
    places = range(1, len(text))
    most = len(text) if len(text) <= 12 else 2
    for count in range(most):
        for chosen in itertools.combinations(places, count):
            edges = [0, *chosen, len(text)]
            yield [text[a:b] for a, b in itertools.pairwise(edges)]
    yield list(text)


@pytest.mark.parametrize(("name", "text", "events"), FOUND)
def test_calls_are_found_and_nothing_else_is_lost(name: str, text: str, events: list[Event]) -> None:
    assert read(OutputParser(TOOLS[name], NAMES), [text]) == events


@pytest.mark.parametrize(("opened", "text", "events"), THOUGHTS)
def test_thoughts_are_found(opened: bool, text: str, events: list[Event]) -> None:
    assert read(OutputParser(reasoning="think", opened=opened), [text]) == events


def test_calls_after_a_thought_and_none_inside() -> None:
    text = (
        f"<think>\nI call {WEATHER}: <tool_call>{WEATHER}</tool_call>\n</think>\n\n<tool_call>\n{WEATHER}\n</tool_call>"
    )
    events = read(OutputParser(TOOLS["hermes"], NAMES, "think"), [text])
    assert isinstance(events[0], Thought)
    assert events[1:] == CALL


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_no_cut_of_a_text_matters(name: str) -> None:
    for format_name, text, _ in FOUND:
        if format_name != name:
            continue
        whole = read(OutputParser(TOOLS[name], NAMES), [text])
        for pieces in cuts(text):
            assert read(OutputParser(TOOLS[name], NAMES), pieces) == whole, pieces


@pytest.mark.parametrize("opened", [False, True])
def test_no_cut_of_a_thought_matters(opened: bool) -> None:
    for _, text, _ in THOUGHTS:
        whole = read(OutputParser(TOOLS["hermes"], NAMES, "think", opened=opened), [text])
        for pieces in cuts(text):
            assert read(OutputParser(TOOLS["hermes"], NAMES, "think", opened=opened), pieces) == whole, pieces


PARTS = st.sampled_from([
    "<tool_call>", "</tool_call>", WEATHER, LATE, '{"name": ', '"weather"', ', "arguments": ', ARGUMENTS, "{", "}", "[",
    "]", '"', "\\", " ", "\n", "x", ";", ",", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "weather", "<think>", "</think>",
    "<|python_tag|>", "é", "\U0001f600",
])  # fmt: skip


@given(st.lists(PARTS, max_size=8), st.sampled_from(sorted(TOOLS)), st.sampled_from([None, *REASONING]), st.booleans())
def test_streamed_is_whole_for_any_text(parts: list[str], name: str, reasoning: str | None, opened: bool) -> None:
    def parser() -> OutputParser:
        return OutputParser(TOOLS[name], NAMES, reasoning, opened=opened)

    text = "".join(parts)
    whole = read(parser(), [text])
    assert read(parser(), list(text)) == whole
    assert read(parser(), parts) == whole
    for event in whole:
        if isinstance(event, CallBegins):
            assert event.name in NAMES


@given(st.text(alphabet='{}[]":,\\ \nabe1<tool_cal>/', max_size=60))
def test_text_that_is_no_call_comes_out_as_it_was(text: str) -> None:
    for name in ("hermes", "llama3", "json"):
        events = read(OutputParser(TOOLS[name], NAMES), [text])
        if not any(isinstance(event, CallBegins) for event in events):
            assert "".join(event.text for event in events if isinstance(event, Said)) == text


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8,
))  # fmt: skip
def test_any_arguments_pass_unchanged(value: object) -> None:
    arguments = json.dumps({"value": value}, ensure_ascii=False)
    for name, text in (
        ("hermes", f'<tool_call>\n{{"name": "time", "arguments": {arguments}}}\n</tool_call>'),
        ("llama3", f'{{"name": "time", "parameters": {arguments}}}'),
        ("json", f'[{{"name": "time", "arguments": {arguments}}}]'),
        ("mistral", f'[TOOL_CALLS][{{"name": "time", "arguments": {arguments}}}]'),
        ("mistral", f"[TOOL_CALLS]time[ARGS]{arguments}"),
    ):
        assert read(OutputParser(TOOLS[name], NAMES), list(text)) == [CallBegins("time"), CallArguments(arguments)]
