"""Events: the parts of an answer in the order in which they are written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Said(NamedTuple):
    """Text for the user."""

    text: str


class Thought(NamedTuple):
    """Text that the model writes for itself before it answers."""

    text: str


class CallBegins(NamedTuple):
    """A tool is called; `id` is what the model names the call, if it does."""

    name: str
    id: str = ""


class CallArguments(NamedTuple):
    """More of the JSON text of the arguments of the call that began last."""

    text: str


Event = Said | Thought | CallBegins | CallArguments


def merged(events: Iterable[Event]) -> list[Event]:
    """The same with neighbours of one kind as one, and without empty ones."""
    result: list[Event] = []
    for event in events:
        if isinstance(event, CallBegins):
            result.append(event)
        elif event.text:
            last = result[-1] if result else None
            if isinstance(last, Said | Thought | CallArguments) and type(last) is type(event):
                result[-1] = type(event)(last.text + event.text)
            else:
                result.append(event)
    return result
