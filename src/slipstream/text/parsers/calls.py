"""Calls: a tool call as a JSON object, its arguments passed on as they are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from slipstream.text.parsers.events import CallArguments, CallBegins
from slipstream.text.parsers.reader import Reader, Reading

SPACE = " \t\r\n"
ARGUMENT_KEYS = ("arguments", "parameters")
BESIDE = ("type", "id")
"""What else may stand in a call that nothing else tells from text."""
LONGEST_NAME = 256


class CallReader(Reader):
    """A reader that can read calls. `names` are those of the tools that there are; None: any."""

    def __init__(self, names: Collection[str] | None = None):
        self._names = names
        super().__init__()

    def call(self, *, sure: bool) -> Reading[str | None]:
        """Read one JSON object {"name": …, "arguments": {…}} and say the call.

        Returns None if it was one, otherwise what was read of it, of which nothing was said. It is one where a tool's
        name and arguments are found, or, if that is `sure`, a name alone. What follows arguments and does not end the
        object as JSON does is read again, as text, by whoever goes on.
        """
        call = _Call(self, sure)
        done = yield from call.read()
        read = "".join(call.read_so_far)
        if done or not call.begun:
            return None if done else read
        self.back(read)
        return None

    def known(self, name: str) -> bool:
        """Whether there is such a tool."""
        return bool(name) and len(name) <= LONGEST_NAME and (self._names is None or name in self._names)


class _Call:
    """One call that is being read."""

    def __init__(self, reader: CallReader, sure: bool):
        self.reader, self.sure = reader, sure
        self.read_so_far: list[str] = []
        self.begun = False
        self.name: str | None = None
        self._waiting: list[str] = []
        self._arguments = False

    def read(self) -> Reading[bool]:
        """Read the object; whether it was a call."""
        if (yield from self._solid()) != "{":
            return False
        character = yield from self._solid()
        while character == '"':
            key = yield from self._string()
            if key is None or (yield from self._solid()) != ":":
                return False
            if not (yield from self._entry(key)):
                return False
            character = yield from self._solid()
            if character == ",":
                character = yield from self._solid()
            elif character != "}":
                return False
        if character != "}" or self.name is None or not (self._arguments or self.sure):
            return False
        self._begin()
        if not self._arguments:
            self.reader.say(CallArguments("{}"))
        return True

    def _entry(self, key: str) -> Reading[bool]:
        character = yield from self._solid()
        if key == "name" and self.name is None:
            name = (yield from self._string()) if character == '"' else None
            if name is None or not self.reader.known(name):
                return False
            self.name = name
            if self._arguments:
                self._begin()
            return True
        if key in ARGUMENT_KEYS and not self._arguments:
            self._arguments = True
            if self.name is not None:
                self._begin()
            before = len(self.read_so_far)
            if character == '"':  # some write the object as a string
                text = yield from self._string()
                self._pass_on("".join(self.read_so_far[before:]) if text is None else text)
                ended = text is not None
            else:
                self._pass_on(character)
                ended = yield from self._value(character, self._pass_on)
            if self.begun:  # what was said is not to be read again
                self.read_so_far.clear()
            return ended
        if not self.sure and key not in BESIDE:  # some other object, which nobody should wait for
            return False
        return (yield from self._value(character, lambda character: None))

    def _begin(self) -> None:
        if not self.begun and self.name is not None:
            self.begun = True
            self.read_so_far.clear()
            self.reader.say(CallBegins(self.name))
            self.reader.say(CallArguments("".join(self._waiting)))

    def _pass_on(self, text: str) -> None:
        if self.begun:
            self.reader.say(CallArguments(text))
        else:
            self._waiting.append(text)

    def _next(self) -> Reading[str]:
        character = yield from self.reader.next()
        self.read_so_far.append(character)
        return character

    def _solid(self) -> Reading[str]:
        """The next character that is no white space."""
        while (character := (yield from self._next())) and character in SPACE:
            pass
        return character

    def _string(self) -> Reading[str | None]:
        """The rest of a string after its quote; None if it is none."""
        raw = '"'
        while character := (yield from self._next()):
            raw += character
            if character == "\\":
                raw += yield from self._next()
            elif character == '"':
                try:
                    return str(json.loads(raw, strict=False))
                except ValueError:
                    return None
        return None

    def _value(self, first: str, out: Callable[[str], None]) -> Reading[bool]:
        """Read the rest of a value that begins with `first`, which was said; whether it ended."""
        if first == '"':
            return (yield from self._through_string(out))
        if first not in ("{", "["):
            return (yield from self._scalar(out))
        depth = 1
        while depth:
            character = yield from self._next()
            if not character:
                return False
            out(character)
            if character == '"':
                if not (yield from self._through_string(out)):
                    return False
            else:
                depth += (character in "{[") - (character in "}]")
        return True

    def _through_string(self, out: Callable[[str], None]) -> Reading[bool]:
        while character := (yield from self._next()):
            out(character)
            if character == "\\":
                out((yield from self._next()))
            elif character == '"':
                return True
        return False

    def _scalar(self, out: Callable[[str], None]) -> Reading[bool]:
        """A number or a word ends where a comma, a bracket or white space comes, which is left to be read."""
        while character := (yield from self.reader.next()):
            if character in ",}]" or character in SPACE:
                self.reader.back(character)
                return True
            self.read_so_far.append(character)
            out(character)
        return False
