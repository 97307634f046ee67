"""Parts: an answer as a list of thoughts, texts and calls, for protocols that write it so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from slipstream.text.parsers import CallArguments, CallBegins, Event, Said, Thought

Kind = Literal["thought", "text", "call"]


@dataclass
class Part:
    """One of them; a call has a `name` and an `id`, and its text are its arguments."""

    kind: Kind
    name: str = ""
    id: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.pieces)

    @property
    def arguments(self) -> dict[str, Any]:
        """A call's arguments; what is no JSON object is under "raw"."""
        try:
            value = json.loads(self.text or "{}")
        except (ValueError, RecursionError):
            value = None
        return value if isinstance(value, dict) else {"raw": self.text}


class Change(NamedTuple):
    """Text that came to the part at this place; `begun` if it is the first."""

    place: int
    begun: bool
    text: str


class Parts(list[Part]):
    """Grows by events."""

    def add(self, events: Sequence[Event], ids: Sequence[str]) -> list[Change]:
        """More events; `ids` are those of all calls so far. Returns what they changed, in order."""
        changes = []
        for event in events:
            match event:
                case CallBegins(name):
                    number = sum(part.kind == "call" for part in self)
                    self.append(Part("call", name, ids[number]))
                    changes.append(Change(len(self) - 1, True, ""))
                case CallArguments(text):
                    self[-1].pieces.append(text)
                    changes.append(Change(len(self) - 1, False, text))
                case Said(text) | Thought(text):
                    kind: Kind = "text" if isinstance(event, Said) else "thought"
                    begun = not self or self[-1].kind != kind
                    if begun:
                        self.append(Part(kind))
                    self[-1].pieces.append(text)
                    changes.append(Change(len(self) - 1, begun, text))
        return changes
