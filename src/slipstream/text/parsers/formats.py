"""Formats: how models write calls and thoughts, and which of these a chat template teaches."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.text.grammars import Part
from slipstream.text.parsers.calls import SPACE, CallReader
from slipstream.text.parsers.events import CallArguments, CallBegins, Thought
from slipstream.text.parsers.reader import Reader, Reading

CALL, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
FENCE = "```"
OPENINGS = (PYTHON_TAG, FENCE + "json")
LONGEST_HEAD = 512
NAMED = re.compile(r"\s*([^\s\[]+)\s*(?:\[CALL_ID\]\s*([^\s\[]+)\s*)?(?:\[ARGS\])?\s*")
"""A call of Mistral's since version 11, up to its arguments."""
MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class BareCalls(CallReader):
    """Calls as JSON objects and nothing else, one after the other or in a list: Llama 3, and models taught no format.

    An object that names no tool, or has no arguments, is text, and so is all that comes after. Many models put calls
    between the fences of a block of code.
    """

    def parse(self) -> Reading[None]:
        """Calls as long as there are any, then text."""
        yield from self.calls_first()
        yield from self.until([])
        self.spaced()

    def calls_first(self) -> Reading[None]:
        """Calls as long as there are any; what stands between them means nothing, what comes after is text."""
        before, called = "", False
        fenced = listed = False
        while True:
            opening = "" if fenced else (yield from self._opening())
            fenced = fenced or opening.endswith((FENCE, FENCE + "json"))
            opening += yield from self.skip(SPACE)
            if not listed and (brackets := (yield from self.skip("["))):
                listed = True
                opening += brackets + (yield from self.skip(SPACE))
            missing = yield from self.call(sure=False)
            if missing is not None:
                break
            called, before = True, (yield from self.skip(SPACE + ";,"))
            if listed and (yield from self.past("]")):
                listed, before = False, (yield from self.skip(SPACE + ";,"))
            if fenced and (yield from self.past(FENCE)):
                fenced, before = False, (yield from self.skip(SPACE + ";,"))
        if called and not (before + opening + missing).strip(SPACE + ";,"):
            return
        self.text((before + opening).lstrip(SPACE + ";") if called else opening)
        self.back(missing)

    def _opening(self) -> Reading[str]:
        """Read past white space and the mark, or the fence, that some write before a call."""
        space, held = (yield from self.skip(SPACE)), ""
        while (character := (yield from self.next())) and any(mark.startswith(held + character) for mark in OPENINGS):
            held += character
            if held in OPENINGS:
                return space + held
        self.back(character if held == FENCE else held + character)
        return space + (held if held == FENCE else "")

    def past(self, mark: str) -> Reading[bool]:
        """Read past a mark, if it comes next, and say whether it did; whatever else is there is read again."""
        held = ""
        while mark.startswith(held) and held != mark:
            character = yield from self.next()
            held += character
            if not character:
                break
        if held != mark:
            self.back(held)
        return held == mark


class HermesCalls(BareCalls):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, any number of them: Hermes, Qwen.

    An answer that begins with a bare call is one too: Qwen's coders leave the marks out.
    """

    def parse(self) -> Reading[None]:
        """Text and calls in turn."""
        yield from self.calls_first()
        while (yield from self.until([CALL])):
            before = yield from self.skip(SPACE)
            read = yield from self.call(sure=True)
            if read is not None:
                self.text(CALL + before)
                self.back(read)
                continue
            self.unspaced()
            yield from self.skip(SPACE)
            yield from self.past(CALL_END)
        self.spaced()


class MistralCalls(CallReader):
    """`[TOOL_CALLS][{…}, …]`, or since version 11 `[TOOL_CALLS]name[ARGS]{…}`, with `[CALL_ID]id` in some."""

    def parse(self) -> Reading[None]:
        """Text, then calls."""
        while (yield from self.until([MISTRAL_CALLS])):
            space = yield from self.skip(SPACE)
            character = yield from self.next()
            self.back(character)
            missing = (yield from self._list()) if character == "[" else (yield from self._named())
            if missing is not None:
                self.text(MISTRAL_CALLS + space)
                self.back(missing)
        self.spaced()

    def _list(self) -> Reading[str | None]:
        read = yield from self.skip("[")
        read += yield from self.skip(SPACE)
        called = False
        while True:
            missing = yield from self.call(sure=True)
            if missing is not None:
                if called:
                    self.back(missing)
                return None if called else read + missing
            called = True
            self.unspaced()
            after = yield from self.skip(SPACE + ",")
            character = yield from self.next()
            if character == "]":
                return None
            if character:
                self.back(character)
            if "," not in after:
                return None

    def _named(self) -> Reading[str | None]:
        head = ""
        while (character := (yield from self.next())) and character != "{" and len(head) < LONGEST_HEAD:
            head += character
        match = NAMED.fullmatch(head)
        if character != "{" or match is None or not self.known(match[1]):
            return head + character
        self.unspaced()
        self.say(CallBegins(match[1], match[2] or ""))
        self.say(CallArguments("{"))
        yield from self._object()
        return None

    def _object(self) -> Reading[None]:
        """Say the rest of an object."""
        depth, quoted = 1, False
        while depth and (character := (yield from self.next())):
            self.say(CallArguments(character))
            if quoted and character == "\\":
                self.say(CallArguments((yield from self.next())))
            elif character == '"':
                quoted = not quoted
            elif not quoted:
                depth += (character in "{[") - (character in "}]")


class Thoughts(Reader):
    """Text up to a mark is thought: `<think>…</think>` and then the answer.

    Where the prompt has `opened` the thought, its first mark is not written.
    """

    def __init__(self, begin: str, end: str, *, opened: bool):
        self._begin, self._end, self._opened = begin, end, opened
        super().__init__()

    def parse(self) -> Reading[None]:
        """A thought, then text."""
        held = ""
        space = yield from self.skip(SPACE)
        while (character := (yield from self.next())) and self._begin.startswith(held + character):
            held += character
            if held == self._begin:
                break
        if held != self._begin:
            self.back(held + character)
            if not self._opened:
                self.back(space)
        if held == self._begin or self._opened:
            yield from self.skip(SPACE)
            yield from self.until([self._end], "think")
            self.unspaced()
            yield from self.skip(SPACE)
        yield from self.until([])
        self.spaced()

    def think(self, text: str) -> None:
        """Text of a thought; white space at its end means nothing."""
        for character in text:
            if character.isspace():
                self._space += character
            else:
                self.say(Thought(self._space + character))
                self._space = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written. `shown` are special tokens that the parser has to see.

    Where a grammar has the model call, `begin` and `end` are around all calls and `before` and `after` around each, in
    which the arguments stand under `key`; `between` separates them. Calls in the middle of a text begin with `trigger`;
    without one they can be told from text only when they come first. Ids of calls have `id_length` characters.
    """

    name: str
    parser: Callable[[Collection[str] | None], CallReader]
    shown: tuple[str, ...] = ()
    begin: str = ""
    before: str = ""
    key: str = "arguments"
    after: str = ""
    between: str = ""
    end: str = ""
    trigger: str = ""
    id_length: int = 24

    def part(self, name: str, parameters: Mapping[str, Any]) -> Part:
        """A call of one tool, for a grammar."""
        schema = {"type": "object", **parameters}  # many leave it out
        return Part(f'{self.before}{{"name": {json.dumps(name)}, "{self.key}": ', schema, f"}}{self.after}")


TOOLS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(
        "hermes", HermesCalls, (CALL, CALL_END), before=CALL + "\n", after="\n" + CALL_END, between="\n", trigger=CALL
    ),
    "llama3": ToolFormat("llama3", BareCalls, (PYTHON_TAG,), key="parameters", between="; "),
    "mistral": ToolFormat(
        "mistral", MistralCalls, (MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGUMENTS), MISTRAL_CALLS + "[", between=", ",
        end="]", trigger=MISTRAL_CALLS, id_length=9,
    ),
    "json": ToolFormat("json", BareCalls, begin="[", between=", ", end="]"),
}  # fmt: skip
"""By the names that --tool-call-parser takes elsewhere, too."""

REASONING: Mapping[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
"""The marks around thoughts."""


def tool_format_of(template: str | None) -> ToolFormat:
    """The format that a chat template teaches its model."""
    text = template or ""
    if MISTRAL_CALLS in text:
        return TOOLS["mistral"]
    if CALL in text:
        return TOOLS["hermes"]
    if PYTHON_TAG in text or '"parameters": ' in text:
        return TOOLS["llama3"]
    return TOOLS["json"]


def reasoning_of(template: str | None) -> str | None:
    """The marks that a chat template's model writes thoughts between; None if it has none."""
    return next((name for name, (_, end) in REASONING.items() if end in (template or "")), None)
