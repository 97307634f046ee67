"""Calls under a grammar, in every format: what the grammar allows to be drawn, the parser reads as calls, no more."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from slipstream.engine.grammar import Grammars
from slipstream.engine.output import Chunk
from slipstream.serving.answers import Choice
from slipstream.serving.tools import Reading, Tool, Toolbox
from slipstream.text import Detokenizer
from slipstream.text.parsers import TOOLS, CallArguments, CallBegins, Event, OutputParser, Said
from slipstream.text.parsers.events import merged

WEATHER = Tool(
    "weather", "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 14}, "days": {"type": "integer", "minimum": -9, "maximum": 120},
            "where": {"type": "array", "items": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1},
                                                           {"enum": ["}", "]", '"', "\\", "é"]}]}, "maxItems": 3},
        },
        "required": ["city", "days"], "additionalProperties": False,
    },
    strict=True,
)  # fmt: skip
ZONE = Tool("weather.zone:v1-2", "", {"properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]})
"""Its name begins like the other's, and its schema does not say that it is an object."""
TWO = (WEATHER, ZONE)
WRITTEN: dict[str, tuple[str, str, str, str, str, str]] = {
    "hermes": ("", "<tool_call>\n", "arguments", "\n</tool_call>", "\n", ""),
    "llama3": ("", "", "parameters", "", "; ", ""),
    "mistral": ("[TOOL_CALLS][", "", "arguments", "", ", ", "]"),
    "json": ("[", "", "arguments", "", ", ", "]"),
}
"""What stands before all calls, before each, before its arguments, after each, between two, and after all."""
IN_TEXT: dict[str, tuple[str, str]] = {"hermes": ("<tool_call>", ""), "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS][")}
"""What calls in the middle of a text begin with, and what stands before the first; others have no such mark."""
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "[THINK]", "[/THINK]")
END = 258


class Bytes:
    """As much of a tokenizer as a grammar asks for: bytes, an end, and perhaps marks that are tokens of their own."""

    def __init__(self, marks: Sequence[str]):
        names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *marks]
        self.token_bytes = [*(bytes([n]) for n in range(256)), *(b"" for _ in names)]
        self.special = {name: 256 + place for place, name in enumerate(names)}
        self.eos, self.bos = frozenset({END}), 257

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def marked(self, text: str) -> list[int]:
        """A text with marks as the tokens that they are."""
        return [self.special[text]] if text in self.special else self.encode(text)


PLAIN, WITH_MARKS = Bytes(()), Bytes(MARKS)
GRAMMARS = {id(one): Grammars(one, len(one.token_bytes)) for one in (PLAIN, WITH_MARKS)}  # type: ignore[arg-type]
tokenizers = pytest.mark.parametrize("tokenizer", [PLAIN, WITH_MARKS], ids=["plain", "special"])


USUAL = frozenset(b'ab "}],.\n<[{')
"""Bytes that are drawn more often than others."""


def draw(
    rng: random.Random, tokenizer: Bytes, grammar: str, scripts: Sequence[Sequence[int]], ending: float
) -> list[int]:
    """Tokens that a grammar allows, at random, up to the end; now and then a script is followed as far as it may be."""
    one = GRAMMARS[id(tokenizer)].constraint(grammar)
    tokens: list[int] = []
    script: list[int] = []
    for place in range(3000):
        if one.over:
            break
        mask = one.mask()
        allowed = [token for token in range(len(tokenizer.token_bytes)) if mask[token >> 5] >> (token & 31) & 1]
        assert allowed, bytes(token for token in tokens if token < 256)
        if END in allowed and (place > 400 or (not script and rng.random() < ending)):
            break
        if not script and rng.random() < 0.1:
            script = list(rng.choice(scripts))
        if script and script[0] in allowed:
            token = script.pop(0)
        else:
            script = []
            usual = [token for token in allowed if token in USUAL] if rng.random() < 0.8 else []
            token = rng.choice(usual or [token for token in allowed if token != END])
        tokens.append(token)
        one.accept(token)
        assert not one.failed
    else:
        raise AssertionError("no end")
    return tokens


def texts_of(box: Toolbox, tokenizer: Bytes, tokens: Sequence[int]) -> list[str]:
    """What the parser gets, token by token."""
    names = {token: text.encode() for text, token in tokenizer.special.items()}
    shown = {token: names[token] for token in box.shown(tokenizer)}  # type: ignore[arg-type]
    detokenizer = Detokenizer(tokenizer.token_bytes, shown=shown)
    return [*map(detokenizer.add, tokens), detokenizer.finish()]


def call_at(name: str, text: str, at: int) -> tuple[tuple[str, Any], int]:
    """The call that is written at a place, read as JSON and nothing else, and where it ends."""
    _, before, key, after, _, _ = WRITTEN[name]
    assert text.startswith(before, at), text[at:]
    call, at = json.JSONDecoder().raw_decode(text, at + len(before))
    assert list(call) == ["name", key]
    assert text.startswith(after, at), text[at:]
    return (call["name"], call[key]), at + len(after)


def calls_at(name: str, text: str, at: int) -> tuple[list[tuple[str, Any]], int]:
    """All calls that are written at a place in one go, and where they end."""
    begin, _, _, _, between, end = WRITTEN[name]
    assert text.startswith(begin, at), text[at:]
    calls, at = [], at + len(begin)
    while True:
        call, at = call_at(name, text, at)
        calls.append(call)
        if text.startswith(end, at) and not (between and text.startswith(between + WRITTEN[name][1] + "{", at)):
            return calls, at + len(end)
        assert text.startswith(between, at), text[at:]
        at += len(between)


def found_in(events: Sequence[Event]) -> tuple[list[tuple[str, Any]], str]:
    """Calls, and what else was said, without white space."""
    calls: list[list[str]] = []
    said = ""
    for event in events:
        match event:
            case CallBegins(name):
                calls.append([name, ""])
            case CallArguments(text):
                calls[-1][1] += text
            case Said(text):
                said += "".join(text.split())
    return [(name, json.loads(arguments)) for name, arguments in calls], said


def pieces_of(rng: random.Random, text: str) -> Iterator[str]:
    """A text in pieces of any length."""
    while text:
        length = rng.choice([1, 2, 3, 10, 50])
        yield text[:length]
        text = text[length:]


def read(box: Toolbox, pieces: Iterator[str] | Sequence[str]) -> list[Event]:
    parser: OutputParser = Reading(box).parser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merged([*events, *parser.finish()])


def valid(box: Toolbox, calls: Sequence[tuple[str, Any]], *, all_strict: bool = True) -> None:
    schemas = {tool.name: tool.parameters for tool in box.tools if tool.strict or all_strict}
    for name, arguments in calls:
        assert isinstance(arguments, dict), "arguments are an object, whatever the schema leaves out"
        jsonschema.validate(arguments, schemas.get(name, {}))


def taken(box: Toolbox, pieces: Sequence[str]) -> Choice:
    """The same as the server collects it."""
    choice = Choice(Reading(box))
    for piece in pieces:
        choice.take(Chunk(0, 0, piece))
    choice.take(Chunk(0, 0, "", finish_reason="stop"))
    return choice


SCRIPTS = ['"}', '"]', "\\", '", "', "</tool_call>", "<tool_call>", "[TOOL_CALLS]", "]", "```", "{", "é", "\U0001f600"]


@tokenizers
@pytest.mark.parametrize("name", sorted(TOOLS))
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", ["required", "weather", "weather.zone:v1-2"])
@pytest.mark.features("tools", "grammar", "streaming")
def test_calls_that_must_be_made_are_found(name: str, choice: str, parallel: bool, tokenizer: Bytes) -> None:
    rng = random.Random(f"{name} {choice} {parallel} {tokenizer is PLAIN}")
    box = Toolbox(TOOLS[name], TWO, True, None if choice == "required" else choice, parallel)
    grammar = box.grammar(tokenizer)  # type: ignore[arg-type]
    scripts = [*map(tokenizer.encode, SCRIPTS), *map(tokenizer.marked, MARKS)]
    names: set[str] = set()
    counts: set[int] = set()
    for _ in range(16):
        pieces = texts_of(box, tokenizer, draw(rng, tokenizer, grammar, scripts, 0.5))
        text = "".join(pieces)
        expected, end = calls_at(name, text, 0)
        assert end == len(text), text
        events = read(box, [text])
        assert found_in(events) == (expected, ""), text
        valid(box, expected)
        assert read(box, pieces) == read(box, list(pieces_of(rng, text))) == events, text
        choice_of = taken(box, pieces)
        assert [(c.name, json.loads("".join(c.arguments))) for c in choice_of.calls] == expected
        assert len({c.id for c in choice_of.calls}) == len(expected)
        assert (choice_of.text, choice_of.finish_reason) == ([], "tool_calls")
        names |= {called for called, _ in expected}
        counts.add(len(expected))
    assert names == ({tool.name for tool in TWO} if choice == "required" else {choice})
    assert (max(counts) > 1) is (choice == "required" and parallel)


@tokenizers
@pytest.mark.parametrize("name", sorted(IN_TEXT))
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.features("tools", "grammar", "streaming")
def test_strict_calls_in_a_text_are_found(name: str, parallel: bool, tokenizer: Bytes) -> None:
    """Text before, between and after them, marks that are begun and left, and marks spelt out letter by letter."""
    rng = random.Random(f"{name} {parallel} {tokenizer is PLAIN}")
    box = Toolbox(TOOLS[name], TWO, parallel=parallel)
    grammar = box.grammar(tokenizer)  # type: ignore[arg-type]
    mark, _ = IN_TEXT[name]
    begun = [tokenizer.marked(mark), tokenizer.encode(mark), tokenizer.encode(mark[:-1])]
    scripts = [*begun, *begun, *map(tokenizer.encode, SCRIPTS), [*tokenizer.marked(mark), *b'[{"name": "weather"']]
    names: set[str] = set()
    with_text = several = 0
    for _ in range(40):
        pieces = texts_of(box, tokenizer, [*b"x", *draw(rng, tokenizer, grammar, scripts, 0.03)])
        text = "".join(pieces)
        calls: list[tuple[str, Any]] = []
        said, at = "", 0
        while (place := text.find(mark, at)) >= 0:
            said += text[at:place]
            more, at = calls_at(name, text, place)
            calls += more
        said += text[at:]
        events = read(box, [text])
        assert found_in(events) == (calls, "".join(said.split())), text
        valid(box, calls, all_strict=False)
        assert read(box, pieces) == read(box, list(pieces_of(rng, text))) == events, text
        choice = taken(box, pieces)
        wanted = calls if parallel else calls[:1]
        assert [(c.name, json.loads("".join(c.arguments))) for c in choice.calls] == wanted, text
        assert "".join("".join(choice.text).split()) == "".join(said.split())
        names |= {called for called, _ in calls}
        with_text += bool(calls) and text.index(mark) > 5
        several += len(calls) > 1
    assert names == {tool.name for tool in TWO}
    assert with_text > 3
    assert several > 2


@pytest.mark.parametrize("name", sorted(IN_TEXT))
@pytest.mark.features("tools", "thoughts", "grammar")
def test_special_tokens_of_thoughts_have_room_in_a_text_and_nowhere_else(name: str) -> None:
    begin, end = (WITH_MARKS.special[mark] for mark in ("[THINK]", "[/THINK]"))
    box, before = Toolbox(TOOLS[name], TWO), WRITTEN[name][0] + WRITTEN[name][1]
    opened = [WITH_MARKS.special[IN_TEXT[name][0]], *before.removeprefix(IN_TEXT[name][0]).encode()]
    tokens = [begin, *b"Hm.", end, *b"\n", *opened, *b'{"name": "weather', begin]
    for thoughts, most in (((begin, end), len(tokens) - 1), ((), 0)):
        grammar = box.grammar(WITH_MARKS, thoughts)  # type: ignore[arg-type]
        one = GRAMMARS[id(WITH_MARKS)].learn(grammar).deep_copy()
        assert one.try_consume_tokens(tokens) == most


@tokenizers
def test_nothing_is_held_to_a_form_that_could_not_be_told_from_text(tokenizer: Bytes) -> None:
    for name, form in TOOLS.items():
        loose = tuple(replace(tool, strict=False) for tool in TWO)
        assert not Toolbox(form, loose).grammar(tokenizer)  # type: ignore[arg-type]
        assert bool(Toolbox(form, TWO).grammar(tokenizer)) is (name in IN_TEXT)  # type: ignore[arg-type]
