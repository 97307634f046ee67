"""Grammars as text: what is refused, what formats and objects are narrowed to, and what is said of mistakes."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import pytest

from slipstream.errors import UsageError
from slipstream.text import grammars as g
from tests.engine.test_grammar import CONSTRAINTS


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: g.of_schema([1]), "object"), (lambda: g.of_schema(False), "nothing"),
        (lambda: g.of_regex("a" * 5000), "4096"), (lambda: g.of_regex(""), "empty"), (lambda: g.of_choice([]), "list"),
        (lambda: g.of_choice(["a", ""]), "empty"), (lambda: g.of_lark("  "), "empty"),
        (lambda: g.of_schema({"enum": [str(n) for n in range(30_000)]}), "20000"),
    ],
)  # fmt: skip
def test_what_is_refused_at_once(make: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        make()


def deep(levels: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(levels):
        value = {"type": "array", "items": value}
    return value


@pytest.mark.parametrize(
    "grammar",
    [
        lambda: g.of_regex("(" * 2000),
        lambda: g.of_schema({"type": "strange"}), lambda: g.of_schema({"$ref": "#/nowhere"}),
        lambda: g.of_schema({"type": "string", "pattern": "("}), lambda: g.of_lark("start: nowhere"),
        lambda: g.of_schema({"type": "string", "pattern": 7}), lambda: g.of_schema(deep(90)),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused(grammar: Any) -> None:
    with pytest.raises(UsageError):
        CONSTRAINTS.learn(grammar())


@pytest.mark.parametrize(("name", "text", "longest"), [
    ("time", "12:30:05.123456789+02:00", 24), ("date-time", "2026-01-02T12:30:05.123456789+02:00", 35),
    ("email", "a" * 60 + "@example.org", 254), ("hostname", "a.example.org", 253),
    ("duration", "P1Y2M3DT4H5M6S", 32), ("uri", "https://a.example.org/b?c=d", 2048),
])  # fmt: skip
def test_a_format_comes_to_an_end(name: str, text: str, longest: int) -> None:
    """Whatever of it is usual may be said; the same with a digit or letter more for ever may not."""
    schema = {"type": "array", "items": {"type": "string", "format": name}}
    whole = [*f'["{text}"]'.encode()]
    assert CONSTRAINTS.learn(g.of_schema(schema)).deep_copy().try_consume_tokens(whole) == len(whole)
    begins = {"email": "a" * 3000, "hostname": "a." * 2000, "duration": "P" + "1" * 3000}
    endless = begins.get(name) or text[: text.index(".") + 1] + "1" * 3000
    assert (
        CONSTRAINTS.learn(g.of_schema(schema)).deep_copy().try_consume_tokens([*f'["{endless}'.encode()]) <= longest + 2
    )


def test_formats_that_nobody_checks_say_nothing() -> None:
    """JSON Schema calls them annotations; a property of that name is none, and values are left as they are."""
    schema = {
        "type": "object", "properties": {"format": {"type": "string", "format": "password", "maxLength": 4}},
        "required": ["format"], "additionalProperties": False, "examples": [{"format": "time"}],
    }  # fmt: skip
    assert CONSTRAINTS.constraint(g.of_schema(schema)).forced(30)[:11] == (*b'{"format": ',)
    assert g.practical({"const": {"format": "time"}}) == {"const": {"format": "time"}}
    assert g.practical({"format": "uri", "minLength": 3000}) == {"format": "uri", "minLength": 3000}
    assert g.practical({"format": "time", "maxLength": 9}) == {"format": "time", "maxLength": 9}
    assert g.practical({"anyOf": [{"format": "email"}, True]}) == {
        "anyOf": [{"format": "email", "maxLength": 254}, True]
    }


def test_an_object_has_the_properties_that_it_names() -> None:
    """Nothing is made up besides, unless the schema wants others, or is put together from several."""
    named = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    closed = {**named, "additionalProperties": False}
    assert g.practical(named) == closed
    assert g.practical({"$defs": {"x": named}, "$ref": "#/$defs/x"})["$defs"]["x"] == closed
    assert g.practical({"anyOf": [named, {"type": "null"}]}) == {"anyOf": [closed, {"type": "null"}]}
    assert g.practical({"properties": {"properties": named}})["properties"] == {"properties": closed}
    assert g.practical({"properties": {"not": named}})["properties"] == {"not": closed}
    for untouched in (
        {**named, "additionalProperties": {"type": "string"}}, {**named, "patternProperties": {"^x": True}},
        {**named, "required": ["a", "b"]}, {"type": "object"}, {"allOf": [named, {"properties": {"b": {}}}]},
        {**named, "anyOf": [{"properties": {"b": True}}]}, {"not": named}, {"$defs": {"x": named}, "allOf": []},
        {"const": named}, {"$defs": {"x": named}, "items": {"$ref": "#/$defs/x", "properties": {"b": True}}},
        {"oneOf": [named, {"properties": {"b": {"format": "time"}}}]}, {**named, "enum": [{"a": 1, "b": 2}]},
        {"$defs": {"x": named}, "$ref": "#/$defs/x", "anyOf": [{"properties": {"b": True}}]},
        {"properties": {"a": True}, "required": [["a"]]}, {"properties": {"a": True}, "required": "a"},
        {"type": "object", "properties": {}}, {"not": {"format": "time"}},
    ):  # fmt: skip
        assert g.practical(untouched) == untouched
    assert CONSTRAINTS.learn(g.of_schema(named)).deep_copy().try_consume_tokens([*b'{"a": 1, ']) == 7


def test_what_is_wrong_with_an_expression_is_said() -> None:
    with pytest.raises(UsageError, match="unclosed group"):
        CONSTRAINTS.learn(g.of_regex("a(b"))


def test_days_exist() -> None:
    """All that are allowed do, and all that do are allowed: years of every kind, with their months' first and last."""
    one = CONSTRAINTS.learn(g.of_schema({"type": "string", "format": "date"}))
    years = [0, 1, 4, 99, 100, 400, 999, 1000, 1900, 2000, 2023, 2024, 2100, 2400, 9999]
    for year, month, day in itertools.product(years, range(14), (0, 1, 28, 29, 30, 31, 32)):
        said = f"{year:04}-{month:02}-{day:02}"
        allowed = one.deep_copy().try_consume_tokens([*f'"{said}"'.encode()]) == 12
        assert allowed is exists(year, month, day), said
    both = CONSTRAINTS.learn(g.of_schema({"type": "string", "format": "date-time"}))
    for said in ("2024-02-29T00:00:00Z", "2023-02-29T00:00:00Z", "0000-01-01T00:00:00Z"):
        allowed = both.deep_copy().try_consume_tokens([*f'"{said}"'.encode()]) == 22
        assert allowed is (said[:4] == "2024")


def exists(year: int, month: int, day: int) -> bool:
    try:
        return bool(datetime.date(year, month, day))
    except ValueError:
        return False
