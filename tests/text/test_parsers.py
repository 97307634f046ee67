"""Parsers of thoughts and calls: what they find, that nothing is lost, and that no cut of the text matters."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
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
    ("hermes", f"{WEATHER}, as you asked.", [*CALL, Said(", as you asked.")]),
    ("hermes", f"```json\n{WEATHER}\n```\n{LATE}\n```python\nx\n```", [*CALL, *CALL, Said("```python\nx\n```")]),
    ("json", f"```json\n{WEATHER}\n```\n\n```json\n[{LATE}]\n```", [*CALL, *CALL]),
    ("llama3", f"<|python_tag|>{WEATHER};<|python_tag|>{LATE};", [*CALL, *CALL]),
    ("json", f"[{WEATHER}] [1]", [*CALL, Said("[1]")]),
    ("json", f"{WEATHER}]", [*CALL, Said("]")]),
    ("hermes", '{"title": "x", "name": "time", "arguments": {}}', [
        Said('{"title": "x", "name": "time", "arguments": {}}')]),
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
    ("hermes", '<tool_call>{"name": "time", "arguments": {} and</tool_call>',
     [CallBegins("time"), CallArguments("{}"), Said("and</tool_call>")]),
    ("hermes", '<tool_call>\n{"name": "time", "arguments": {}\n</tool_call>', TIME),
    ("hermes", '<tool_call>{"name": "time", "arguments": {}, and', [*TIME, Said(", and")]),
    ("hermes", '<tool_call>{"arguments": {}, "name": "time" and', [*TIME, Said("and")]),
    ("hermes", '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1',
     [CallBegins("time"), CallArguments('{\\"a\\": 1')]),
    ("json", '[{"name": "time", "arguments": {}, "id": 4 and', [*TIME, Said(', "id": 4 and')]),
    ("mistral", f"[TOOL_CALLS][{WEATHER[:-1]} and", [*CALL, Said("and")]),
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


def marked(text: str, reasoning: str) -> str:
    """The same with the marks that others write around thoughts."""
    begin, end = REASONING[reasoning]
    return text.replace("<think>", begin).replace("</think>", end).replace("<thin", begin[:5])


@pytest.mark.parametrize("reasoning", sorted(REASONING))
@pytest.mark.parametrize(("opened", "text", "events"), THOUGHTS)
def test_thoughts_are_found(opened: bool, text: str, events: list[Event], reasoning: str) -> None:
    found = read(OutputParser(reasoning=reasoning, opened=opened), [marked(text, reasoning)])
    assert found == [type(event)(marked(event.text, reasoning)) for event in events]  # type: ignore[union-attr]


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


MARKS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "```", "```json",
    *itertools.chain(*REASONING.values()),
]  # fmt: skip
HALVES = st.sampled_from([mark[:length] for mark in MARKS for length in range(1, len(mark))])
CUT_CALLS = st.sampled_from([call[:length] for call in (WEATHER, LATE) for length in range(1, len(call) + 1)])
PARTS = st.one_of(
    st.sampled_from([
        WEATHER, LATE, '{"name": ', '"weather"', ', "arguments": ', ARGUMENTS, "{", "}", "[", "]", '"', "\\", " ", "\n",
        "x", ";", ",", "weather", "é", "\U0001f600",
    ]),
    st.sampled_from(MARKS), HALVES, CUT_CALLS,
)  # fmt: skip


def no_cut_matters(make: Callable[[], OutputParser], text: str) -> None:
    """After every beginning of a text, come as it may, the same is said, and the same will be."""
    one_by_one, said = make(), list[Event]()
    whole = read(make(), [text])
    for length in range(len(text) + 1):
        at_once = make()
        begun = at_once.feed(text[:length])
        assert begun == said, text[:length]
        if length % 16 == 0:
            assert merged([*begun, *at_once.feed(text[length:]), *at_once.finish()]) == whole, text[:length]
        said = merged([*said, *one_by_one.feed(text[length : length + 1])])
    assert merged([*said, *one_by_one.finish()]) == whole


KINDS_OF_PARSERS = [
    (name, reasoning, opened)
    for name, reasoning in itertools.product([None, *sorted(TOOLS)], [None, *sorted(REASONING)])
    for opened in ([False, True] if reasoning else [False])
]
"""Tools' formats, marks of thoughts, and whether the prompt has opened one."""


def parser_of(kind: tuple[str | None, str | None, bool]) -> Callable[[], OutputParser]:
    name, reasoning, opened = kind
    return lambda: OutputParser(TOOLS[name] if name else None, NAMES, reasoning, opened=opened)


@pytest.mark.parametrize("kind", KINDS_OF_PARSERS)
def test_what_is_known_after_every_character(kind: tuple[str | None, str | None, bool]) -> None:
    """Nobody's text is read differently where it falls into pieces: own formats, others', with thoughts and without."""
    name, reasoning, _ = kind
    begin, end = REASONING[reasoning or "think"]
    for own, text, _ in FOUND:
        if name == own and reasoning is None:
            no_cut_matters(parser_of(kind), text)
        elif len(text) < 50 and name in (None, own):
            no_cut_matters(parser_of(kind), f"{begin}\nHm.\n{end}\n\n{text}")
    for _, text, _ in THOUGHTS:
        no_cut_matters(parser_of(kind), marked(text, reasoning or "think"))


@settings(deadline=None)
@given(st.lists(PARTS, max_size=6), st.sampled_from(KINDS_OF_PARSERS))
def test_streamed_is_whole_for_any_text(parts: list[str], kind: tuple[str | None, str | None, bool]) -> None:
    make, text = parser_of(kind), "".join(parts)
    no_cut_matters(make, text)
    whole = read(make(), [text])
    assert read(make(), parts) == whole
    for event in whole:
        if isinstance(event, CallBegins):
            assert event.name in NAMES


LOUD = "éßñø"
"""Characters that are in no mark and no key: whoever reads past them has lost them."""
PROSE = st.lists(st.sampled_from([*LOUD, " ", "\n", "x", "{", "}", '"', ": ", "1"]) | HALVES, max_size=6).map(
    lambda pieces: "x" + "".join(pieces) + "."
)
OBJECTS = st.dictionaries(
    st.text(LOUD + 'a"\\{}[]', max_size=3), st.integers() | st.text(LOUD + " '<}", max_size=4), max_size=2
)


@given(st.lists(st.sampled_from([*LOUD, *MARKS, "{", "}", "[", "]", '"', "\\", " ", "\n", ";", ",", "time"]) | HALVES
                | CUT_CALLS, max_size=9), st.sampled_from(KINDS_OF_PARSERS))  # fmt: skip
def test_whatever_happens_no_character_gets_lost(parts: list[str], kind: tuple[str | None, str | None, bool]) -> None:
    """In calls that break off, between marks that mean nothing, in thoughts that never end."""
    text = "".join(parts)
    came = "".join("".join(event) for event in read(parser_of(kind)(), [text]))
    assert [c for c in came if c in LOUD] == [c for c in text if c in LOUD], text


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_what_comes_after_a_call_that_breaks_off_is_text(name: str) -> None:
    """Wherever it does."""
    begin = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]["}.get(name, "")
    for call, rest in itertools.product((WEATHER, LATE), (LOUD, f", {LOUD}", f"}} {LOUD}", f' "{LOUD}"')):
        for length in range(len(call) + 1):
            text = begin + call[:length] + rest
            came = "".join("".join(event) for event in read(OutputParser(TOOLS[name], NAMES), [text]))
            assert LOUD in came, text


def test_marks_of_thoughts() -> None:
    for name, text in (
        ("think", "<think>Hm.</think>Yes."), ("seed", "<seed:think>Hm.</seed:think>Yes."),
        ("mistral", "[THINK]Hm.[/THINK]Yes."),
    ):  # fmt: skip
        assert read(OutputParser(reasoning=name), [text]) == [Thought("Hm."), Said("Yes.")]
        for other in REASONING.keys() - {name}:
            assert read(OutputParser(reasoning=other), [text]) == [Said(text)]


CALL_FORMS: dict[str, tuple[str, str, str]] = {
    "hermes": ("<tool_call>\n%F\n</tool_call>", "<tool_call>%P</tool_call>\n", "<tool_call> %L"),
    "mistral": ("[TOOL_CALLS][%F]", "[TOOL_CALLS]time[ARGS]%A", "[TOOL_CALLS] [%L, %F]"),
    "llama3": ("%F; ", "[%P, %F] ", "```json\n%L\n```\n"),
    "json": ("%F; ", "[%P, %F] ", "```json\n%L\n```\n"),
}
"""Ways to call that a format knows: name first, with parameters, name last, arguments alone."""


def written(form: str, arguments: str) -> str:
    """Calls of `time`."""
    calls = {
        "F": f'{{"name": "time", "arguments": {arguments}}}', "P": f'{{"name": "time", "parameters": {arguments}}}',
        "L": f'{{"arguments": {arguments}, "id": "1", "name": "time"}}', "A": arguments,
    }  # fmt: skip
    return re.sub("%([FPLA])", lambda match: calls[match[1]], form)


@given(st.data(), st.sampled_from(sorted(TOOLS)), st.sampled_from([None, *sorted(REASONING)]))
def test_texts_calls_and_thoughts_come_out_as_they_went_in(
    data: st.DataObject, name: str, reasoning: str | None
) -> None:
    """But for the marks, and white space at the seams."""
    text, expected = "", list[Event]()
    if reasoning is not None:
        begin, end = REASONING[reasoning]
        thought = data.draw(PROSE)
        text, expected = f"{begin}\n{thought}\n{end}\n", [Thought(thought)]
    bare = name in ("llama3", "json")
    forms = [data.draw(st.sampled_from(CALL_FORMS[name]))] if bare else data.draw(st.lists(
        st.sampled_from([*CALL_FORMS[name], ""]), max_size=4))  # fmt: skip
    for form in forms:
        if form:
            arguments = json.dumps(data.draw(OBJECTS), ensure_ascii=False)
            text += written(form, arguments)
            expected += [CallBegins("time"), CallArguments(arguments)] * (2 if ", %F" in form else 1)
        else:
            prose = data.draw(PROSE)
            text, expected = text + prose, [*expected, Said(prose)]
    prose = data.draw(PROSE)
    found = read(OutputParser(TOOLS[name], NAMES, reasoning), [text + prose])
    assert solid(found) == solid([*expected, Said(prose)]), text + prose


def solid(events: list[Event]) -> list[Event]:
    """Texts without white space."""
    return merged(type(e)("".join(e.text.split())) if isinstance(e, Said | Thought) else e for e in events)


@given(st.lists(st.sampled_from([*itertools.chain(*REASONING.values()), *LOUD, " ", "\n", "x"]) | HALVES, max_size=8),
       st.sampled_from(sorted(REASONING)), st.booleans())  # fmt: skip
def test_a_thought_with_its_marks_is_the_text(parts: list[str], reasoning: str, opened: bool) -> None:
    text, (begin, end) = "".join(parts), REASONING[reasoning]
    events = read(OutputParser(reasoning=reasoning, opened=opened), [text])
    thought = "".join(event.text for event in events if isinstance(event, Thought))
    said = "".join(event.text for event in events if isinstance(event, Said))
    ways = [thought, thought + end + said]
    ways = [*ways, *(begin + way for way in ways)] if opened else [said, *(begin + way for way in ways)]
    assert "".join(text.split()) in ["".join(way.split()) for way in ways]
    if not text.lstrip().startswith(begin) and not opened:
        assert (thought, said) == ("", text)


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


def test_an_answer_that_is_some_other_object_is_not_held_back() -> None:
    """With tools at hand, JSON that is no call is streamed as it comes."""
    parser = OutputParser(TOOLS["hermes"], NAMES)
    assert parser.feed('{"title": "A long') == [Said('{"title": "A long')]
