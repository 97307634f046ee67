"""Chat templates: rendered in a sandbox (sandbox.py) within a time limit; a bad one is a clear error."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import jinja2

from slipstream.text.sandbox import MAX_TEXT, TemplateError, environment

MAX_TEMPLATE = 1 << 20
MAX_SECONDS = 2.0

Message = Mapping[str, Any]
_SANDBOX = environment.__code__.co_filename


def hash_of(template: str | None) -> str:
    """Names a template; empty if there is none."""
    return hashlib.sha256(template.encode()).hexdigest()[:16] if template else ""


class ChatTemplate:
    """A compiled template. Raises TemplateError if the source is too long or not valid."""

    def __init__(self, source: str):
        if len(source) > MAX_TEMPLATE:
            raise TemplateError(f"chat template: {len(source)} characters are more than {MAX_TEMPLATE}")
        self.source = source
        try:
            self._template = environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError) as error:
            raise TemplateError(f"chat template: {error or type(error).__name__}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text. Raises TemplateError if the template fails, or takes too long."""
        values = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            **variables,
        }
        parts, size = [], 0
        try:
            with _deadline(time.monotonic() + MAX_SECONDS):
                for part in self._template.generate(**values):
                    size += len(part)
                    if size > MAX_TEXT:
                        raise TemplateError("chat template: the output is too long")
                    parts.append(part)
        except TemplateError:
            raise
        except Exception as error:
            raise TemplateError(f"chat template: {error or type(error).__name__}") from error
        return "".join(parts)


class _deadline:
    """Raises TemplateError in this thread's Python code once `until` has passed.

    A trace function sees every line of the compiled template and of what it calls, on any thread and
    without signals; a single built-in call is bounded by the limits on its operands. Of the sandbox's own
    functions, which are many and short, it sees the calls.
    """

    def __init__(self, until: float):
        self.until = until

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        self._thread = threading.get_ident()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > self.until:
            raise TemplateError(f"chat template: it ran for more than {MAX_SECONDS:g} seconds")
        return None if frame.f_code.co_filename == _SANDBOX else self._trace
