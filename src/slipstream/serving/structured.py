"""Structured answers: what of a request says what form its answer has, as a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from slipstream.errors import UsageError
from slipstream.serving.errors import bad_request
from slipstream.text import grammars

KINDS: Mapping[str, Callable[[Any], str]] = {
    "json": lambda value: grammars.of_schema(_parsed(value)),
    "json_object": lambda value: grammars.of_any_object() if value is True else _refuse("json_object is true"),
    "regex": grammars.of_regex,
    "choice": grammars.of_choice,
    "grammar": grammars.of_lark,
}
"""By the names that structured_outputs has for them."""


class Form(NamedTuple):
    """What form an answer must have: a grammar, empty if any will do, and the request's field that it comes from."""

    grammar: str = ""
    field: str = ""


def form_of(
    response_format: Mapping[str, Any] | None, structured: Mapping[str, Any] | None, guided: Mapping[str, Any],
    called: str = "response_format",
) -> Form:  # fmt: skip
    """The form that a request asks for. Raises ApiError with the field at fault.

    `response_format` is OpenAI's, whatever the client `called` it; `structured`, an object with one of KINDS, and
    `guided`, guided_json and the like, are what vLLM's clients send.
    """
    wanted = [(f"guided_{kind}", kind, value) for kind, value in guided.items() if value is not None]
    for kind, value in (structured or {}).items():
        if kind not in KINDS and value is not None:
            raise bad_request(f"structured_outputs.{kind} is none of {', '.join(KINDS)}", "structured_outputs")
        if value is not None and value is not False:
            wanted.append((f"structured_outputs.{kind}", kind, value))
    if response_format is not None:
        wanted += _formatted(response_format, called)
    if len(wanted) > 1:
        raise bad_request(f"{wanted[0][0]} and {wanted[1][0]} cannot both be kept to", wanted[1][0])
    for field, kind, value in wanted:
        try:
            return Form(KINDS[kind](value), field)
        except UsageError as error:
            raise bad_request(f"{field}: {error}", field) from error
    return Form()


def _formatted(response_format: Mapping[str, Any], called: str) -> list[tuple[str, str, Any]]:
    match response_format.get("type"):
        case "text":
            return []
        case "json_object":
            return [(called, "json_object", True)]
        case "json_schema":
            inner = response_format.get("json_schema", response_format)
            schema = inner.get("schema") if isinstance(inner, Mapping) else None
            if schema is None:
                raise bad_request(f"{called} of type json_schema needs a schema", called)
            return [(called, "json", schema)]
        case other:
            raise bad_request(f"{called} is of type text, json_object or json_schema, not {str(other)[:40]!r}", called)


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"a schema that is a text must be JSON: {error}") from error


def _refuse(why: str) -> str:
    raise UsageError(why)
