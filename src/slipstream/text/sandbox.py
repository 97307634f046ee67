"""jinja2's sandbox with limits: nothing a template does may take much memory in one operation."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.errors import SlipstreamError

MAX_TEXT = 16 << 20
MAX_RANGE = 100_000
MAX_COUNT = 100_000
_WIDE_FORMAT = re.compile(r"[%{][^%{}]*\d{6}")


class TemplateError(SlipstreamError):
    """A chat template that cannot be used, or that refused the messages."""


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote; for rendering it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Keep the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _limited(parts: Iterable[str]) -> str:
    """Parts joined, unless they are too long together: what every macro and block goes through."""
    pieces = list(parts)
    if sum(map(len, pieces)) > MAX_TEXT:
        raise TemplateError("chat template: a text is too long")
    return "".join(pieces)


def _check_counts(arguments: Iterable[Any]) -> None:
    """Widths and counts that would make a text too long."""
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MAX_COUNT:
            raise TemplateError(f"chat template: the number {argument} is too large for this")


def _check_format(form: str) -> None:
    """A format string with a width that would make a text too long."""
    if _WIDE_FORMAT.search(form):
        raise TemplateError("chat template: a format is too wide")


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Sends `a ~ b` through the environment, where its length is checked."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Any) -> None:
        """Write the call."""
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """Refuses what could take much memory or time in one operation."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})
    code_generator_class = _CodeGenerator
    concat = staticmethod(_limited)

    @staticmethod
    def joined(parts: Iterable[Any]) -> str:
        """What `~` does."""
        return _limited(str(part) for part in parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Repetition, concatenation and formatting are limited; powers are not there."""
        if operator == "**":
            raise TemplateError("chat template: powers are not allowed")
        sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        if operator == "*":
            times = [side for side in (left, right) if isinstance(side, int)]
            if sizes and times and sizes[0] * max(times[0], 0) > MAX_TEXT:
                raise TemplateError("chat template: a repetition is too long")
        elif operator == "+" and sum(sizes) > MAX_TEXT:
            raise TemplateError("chat template: a text is too long")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
            if "*" in left:
                _check_counts(right if isinstance(right, tuple) else [right])
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        """Methods of strings are checked for their widths before they run."""
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            if function.__name__ in ("format", "format_map"):
                _check_format(owner)
            else:
                _check_counts([*arguments, *named.values()])
            if function.__name__ == "replace" and len(arguments) > 1:
                grown = (owner.count(arguments[0]) if arguments[0] else len(owner) + 1) * len(arguments[1])
                if grown > MAX_TEXT:
                    raise TemplateError("chat template: a replacement is too long")
        return super().call(context, function, *arguments, **named)


def _guarded(function: Any) -> Any:
    """A filter whose arguments, its input aside, are checked for their widths."""

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        _check_counts([*arguments, *named.values()])
        return function(*arguments, **named)

    return checked


def _format(form: str, *arguments: Any, **named: Any) -> str:
    _check_format(str(form))
    return do_format(form, *arguments, **named)


def _range(*bounds: int) -> range:
    result = range(*bounds)
    if len(result) > MAX_RANGE:
        raise TemplateError(f"chat template: a range is longer than {MAX_RANGE}")
    return result


def _raise(message: str) -> NoReturn:
    raise TemplateError(f"chat template: {message}")


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    _check_counts([indent])
    return json.dumps(value, ensure_ascii=False, indent=indent)


def environment() -> _Environment:
    """A fresh sandbox with what chat templates expect to find."""
    result = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    result.filters["format"] = _format
    for name in ("center", "indent", "truncate", "wordwrap", "batch", "slice", "round"):
        result.filters[name] = _guarded(result.filters[name])
    result.filters["tojson"] = _tojson
    result.globals.update(
        raise_exception=_raise,
        range=_range,
        strftime_now=lambda form: datetime.now().strftime(form),
    )
    for name in ("lipsum", "cycler", "joiner"):
        result.globals.pop(name, None)
    return result
