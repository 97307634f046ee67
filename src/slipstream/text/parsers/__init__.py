"""What a model's text says besides text: thoughts between marks, and calls of tools, found while it is written."""

from slipstream.text.parsers.events import CallArguments, CallBegins, Event, Said, Thought
from slipstream.text.parsers.formats import REASONING, TOOLS, ToolFormat, reasoning_of, tool_format_of
from slipstream.text.parsers.output import OutputParser

__all__ = [
    "REASONING",
    "TOOLS",
    "CallArguments",
    "CallBegins",
    "Event",
    "OutputParser",
    "Said",
    "Thought",
    "ToolFormat",
    "reasoning_of",
    "tool_format_of",
]
