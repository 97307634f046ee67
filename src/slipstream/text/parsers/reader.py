"""Reader: parsers as coroutines that are sent one character at a time, and "" when the text has ended.

What such a parser says depends on the characters alone, not on how they came in pieces: streamed and whole answers are
the same for every way to cut a text.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Generator, Sequence
from typing import TypeVar

from slipstream.text.parsers.events import Event, Said, merged

T = TypeVar("T")
Reading = Generator[None, str, T]
"""A coroutine that reads characters and returns T."""


class Reader:
    """Base of parsers: feed it text, get events."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._back: list[str] = []
        self._space = ""
        self._over = False
        self._reading = self.parse()
        next(self._reading)

    @abstractmethod
    def parse(self) -> Reading[None]:
        """Read to the end of the text, which is a character "", and `say` what was found."""

    def feed(self, text: str) -> list[Event]:
        """More text; returns what is known by now."""
        for character in text:
            self._reading.send(character)
        return self._taken()

    def finish(self) -> list[Event]:
        """No more text comes; returns the rest."""
        with contextlib.suppress(StopIteration):
            self._reading.send("")
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return merged(events)

    def say(self, event: Event) -> None:
        """An event is sure."""
        self._events.append(event)

    def text(self, text: str) -> None:
        """Text for the user. White space waits for what follows: before a call, and after one, it means nothing."""
        for character in text:
            if character.isspace():
                self._space += character
            else:
                self.say(Said(self._space + character))
                self._space = ""

    def spaced(self) -> None:
        """White space that waits belongs to the text."""
        if self._space:
            self.say(Said(self._space))
        self._space = ""

    def unspaced(self) -> None:
        """White space that waits belongs to nothing."""
        self._space = ""

    def next(self) -> Reading[str]:
        """The next character; "" at the end, however often it is asked for."""
        if self._back:
            return self._back.pop()
        if self._over:
            return ""
        character = yield
        self._over = not character
        return character

    def back(self, text: str) -> None:
        """These characters are to be read again, next."""
        self._back += reversed(text)

    def skip(self, characters: str) -> Reading[str]:
        """Read past all of these; returns what was read."""
        skipped = ""
        while (character := (yield from self.next())) and character in characters:
            skipped += character
        if character:
            self.back(character)
        return skipped

    def until(self, marks: Sequence[str], say: str = "text") -> Reading[str]:
        """Say text up to the first of some marks, and return the mark; "" if the text ends before.

        No mark may begin another.
        """
        out, held = getattr(self, say), ""
        while character := (yield from self.next()):
            held += character
            while held and not any(mark.startswith(held) for mark in marks):
                out(held[0])
                held = held[1:]
            if held in marks:
                return held
        for character in held:
            out(character)
        return ""
