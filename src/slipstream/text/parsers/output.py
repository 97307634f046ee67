"""OutputParser: thoughts first, and calls in what is not thought."""

from __future__ import annotations

from collections.abc import Collection

from slipstream.text.parsers.events import Event, Said, merged
from slipstream.text.parsers.formats import REASONING, Thoughts, ToolFormat


class OutputParser:
    """One answer's parser. Without a format, and without marks, all text is said."""

    def __init__(
        self,
        tools: ToolFormat | None = None,
        names: Collection[str] | None = None,
        reasoning: str | None = None,
        *,
        opened: bool = False,
    ):
        """`names` are those of the tools there are. `opened` says that the prompt ends inside a thought."""
        self._calls = tools.parser(names) if tools is not None else None
        self._thoughts = Thoughts(*REASONING[reasoning], opened=opened) if reasoning is not None else None

    def feed(self, text: str) -> list[Event]:
        """More text of the answer."""
        if self._thoughts is None:
            return self._called([Said(text)])
        return self._called(self._thoughts.feed(text))

    def finish(self) -> list[Event]:
        """The rest, when the answer has ended."""
        events = self._called(self._thoughts.finish()) if self._thoughts is not None else []
        return merged([*events, *(self._calls.finish() if self._calls is not None else [])])

    def _called(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return merged(events)
        result: list[Event] = []
        for event in events:
            result += self._calls.feed(event.text) if isinstance(event, Said) else [event]
        return merged(result)
