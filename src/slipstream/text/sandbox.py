"""jinja2's sandbox with limits: nothing a template does may take much memory in one operation."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, MappingView
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from slipstream.errors import SlipstreamError

MAX_TEXT = 16 << 20
MAX_RANGE = 100_000
MAX_COUNT = 100_000
MAX_INDENT = 16
MAX_BITS = 1 << 16
_LAZY = frozenset(
    ("attr", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random", "reject",
     "rejectattr", "select", "selectattr")
)  # fmt: skip
"""Filters that look at no more of a value than they are asked for."""
_COMPARING = (
    "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le", "in"
)  # fmt: skip
_WIDE_FORMAT = re.compile(r"[%{][^%{}]*\d{6}")


class TemplateError(SlipstreamError):
    """A chat template that cannot be used, or that refused the messages."""


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote; for rendering it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        """Keep the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _weight(value: Any, known: dict[int, tuple[int, Any]]) -> int:
    """Characters and entries in a value; what it holds twice counts twice, as if it were written out."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        parts: Any = [*value, *value.values()]
    elif isinstance(value, Namespace):
        parts = value._Namespace__attrs.values()
    elif isinstance(value, list | tuple | set | frozenset | MappingView):
        parts = value
    else:
        return 1
    if id(value) not in known:
        parts = list(parts)
        weight = len(parts)
        for part in parts:
            weight += len(part) if isinstance(part, str) else _weight(part, known)
        known[id(value)] = weight, (value, parts)
    return known[id(value)][0]


def _weighed(value: Any) -> Any:
    """A value that is about to be gone through as a whole, in one operation that nothing can interrupt."""
    if not isinstance(value, str | int | float) and value is not None and _weight(value, {}) > MAX_TEXT:
        raise TemplateError("chat template: a value is too large")
    return value


def _held(value: Any) -> Any:
    """The same; what comes bit by bit is collected first."""
    return _weighed(list(value) if isinstance(value, Iterator) else value)


def _grown(size: int) -> None:
    """Raise TemplateError for a text that would be too long."""
    if size > MAX_TEXT:
        raise TemplateError("chat template: a text is too long")


def _limited(parts: Iterable[str]) -> str:
    """Parts joined, unless they are too long together: what every macro and block goes through."""
    pieces = list(parts)
    _grown(sum(map(len, pieces)))
    return "".join(pieces)


def _check_counts(arguments: Iterable[Any]) -> None:
    """Widths and counts that would make a text too long."""
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MAX_COUNT:
            raise TemplateError(f"chat template: the number {argument} is too large for this")


def _check_format(form: str, arguments: Iterable[Any]) -> None:
    """A format string that would make a text too long, by a width or by what it puts in."""
    if _WIDE_FORMAT.search(form):
        raise TemplateError("chat template: a format is too wide")
    longest = max((_weight(argument, {}) for argument in arguments), default=0)
    _grown(len(form) + (form.count("%") + form.count("{")) * longest)


def _check_replacement(text: str, old: str, new: str) -> None:
    _grown(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Sends what goes through whole values in one operation through the environment, where they are weighed."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        """Write the call."""
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Any) -> None:
        """Both sides are weighed."""
        self.write("(")
        self._weigh(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Any) -> None:
        """The other side."""
        self.write(f" {jinja2.compiler.operators[node.op]} ")
        self._weigh(node.expr, frame)

    def _weigh(self, node: nodes.Expr, frame: Any) -> None:
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
            return
        self.write("environment.weighed(")
        self.visit(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:
        """It may become a key, which is hashed as a whole."""
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.weighed(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:
        """So may its keys once more."""
        self.write("environment.weighed(")
        super().visit_Dict(node, frame)
        self.write(")")


class _Environment(ImmutableSandboxedEnvironment):
    """Refuses what could take much memory or time in one operation."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})
    code_generator_class = _CodeGenerator
    concat = staticmethod(_limited)
    weighed = staticmethod(_weighed)

    @staticmethod
    def joined(parts: Iterable[Any]) -> str:
        """What `~` does."""
        return _limited(str(_weighed(part)) for part in parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Repetition, concatenation and formatting are limited; powers are not there."""
        if operator == "**":
            raise TemplateError("chat template: powers are not allowed")
        sizes = [len(side) for side in (left, right) if isinstance(side, str | bytes | list | tuple)]
        if operator == "*":
            times = [side for side in (left, right) if isinstance(side, int)]
            if sizes and times and sizes[0] * max(times[0], 0) > MAX_TEXT:
                raise TemplateError("chat template: a repetition is too long")
            if len(times) == 2 and sum(number.bit_length() for number in times) > MAX_BITS:
                raise TemplateError("chat template: a number is too large")
        elif operator == "+" and sum(sizes) > MAX_TEXT:
            raise TemplateError("chat template: a text is too long")
        elif operator == "%" and isinstance(left, str):
            _check_format(left, [right])
            if "*" in left:
                _check_counts(right if isinstance(right, tuple) else [right])
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """A key is hashed as a whole."""
        return super().getitem(obj, _weighed(argument))

    def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        """What is built in is checked before it runs: it cannot be interrupted."""
        method = getattr(function, "__wrapped__", function)  # as str.format is by the sandbox
        owner = getattr(method, "__self__", None)
        if not isinstance(function, Macro):
            arguments = tuple(map(_held, arguments))
            named = {name: _held(value) for name, value in named.items()}
        if isinstance(owner, list | tuple):
            _weighed(owner)
        elif isinstance(method, BuiltinMethodType) and not isinstance(owner, str | dict):
            raise TemplateError(f"chat template: {method.__name__} is not allowed")
        if isinstance(owner, str):
            self._check_text_method(owner, method.__name__, arguments, named)
        return super().call(context, function, *arguments, **named)

    @staticmethod
    def _check_text_method(text: str, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Methods of strings that would make much of little."""
        match name, arguments:
            case (("format" | "format_map"), _):
                _check_format(text, (*arguments, *named.values()))
                return
            case (("encode" | "expandtabs" | "maketrans" | "translate"), _):
                raise TemplateError(f"chat template: {name} is not allowed")
            case "join", [parts]:
                _grown(len(text) * len(parts))
            case "replace", [str(old), str(new), *_]:
                _check_replacement(text, old, new)
        _check_counts([*arguments, *named.values()])


def _guarded(name: str, function: Any) -> Any:
    """A filter, or test, that goes through all it is given, and what is checked before."""

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        arguments = tuple(map(_held, arguments))
        named = {key: _held(value) for key, value in named.items()}
        if (check := _CHECKS.get(name)) is not None:
            check(*arguments, **named)
        return function(*arguments, **named)

    return checked


def _counts(_: Any, *arguments: Any, **named: Any) -> None:
    _check_counts([*arguments, *named.values()])


def _formats(form: Any, *arguments: Any, **named: Any) -> None:
    _check_format(str(form), (*arguments, *named.values()))


def _replaces(_: Any, text: Any, old: Any, new: Any, count: Any = None) -> None:
    _check_replacement(str(text), str(old), str(new))


def _joins(_: Any, value: Any, d: Any = "", attribute: Any = None) -> None:
    _grown(len(value) * len(str(d)))


def _indents(text: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    _check_counts([width])
    _grown(str(text).count("\n") * (width if isinstance(width, int) else len(str(width))))


def _adds(_: Any, values: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise TemplateError("chat template: sum is of numbers")


_CHECKS = {
    "batch": _counts, "center": _counts, "format": _formats, "indent": _indents, "join": _joins, "replace": _replaces,
    "round": _counts, "slice": _counts, "sum": _adds, "truncate": _counts,
}  # fmt: skip


def _range(*bounds: int) -> range:
    result = range(*bounds)
    if len(result) > MAX_RANGE:
        raise TemplateError(f"chat template: a range is longer than {MAX_RANGE}")
    return result


def _raise(message: str) -> NoReturn:
    raise TemplateError(f"chat template: {message}")


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    if indent is not None and (not isinstance(indent, int) or indent > MAX_INDENT):
        raise TemplateError(f"chat template: JSON is indented by at most {MAX_INDENT}")
    return json.dumps(value, ensure_ascii=False, indent=indent)


def environment() -> _Environment:
    """A fresh sandbox with what chat templates expect to find."""
    result = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_weighed
    )  # fmt: skip
    for name in ("urlize", "wordwrap", "xmlattr"):  # nothing for prompts, and hard to bound
        del result.filters[name]
    result.filters["tojson"] = _tojson
    for name, function in result.filters.items():
        if name not in _LAZY:
            result.filters[name] = _guarded(name, function)
    for name in _COMPARING:
        result.tests[name] = _guarded(name, result.tests[name])
    result.globals.update(
        raise_exception=_raise,
        range=_range,
        strftime_now=lambda form: datetime.now().strftime(form),
    )
    for name in ("lipsum", "cycler", "joiner"):
        result.globals.pop(name, None)
    return result
