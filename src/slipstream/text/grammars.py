"""Grammars as text: from JSON schemas, regular expressions, choices and Lark, checked within limits.

A schema can be made so that compiling it would take for ever. It is bounded before anybody looks at what it means, and
llguidance counts what it does and stops.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import LLParserLimits

MOST_CHARACTERS = 1 << 18
"""Of a schema or grammar."""
MOST_DEPTH, MOST_NODES = 64, 20_000
"""Of a schema as JSON."""
MOST_REGEX = 4096
LONGEST_FORMATS = {"time": 24, "date-time": 35, "duration": 32, "email": 254, "hostname": 253, "uri": 2048}
"""Characters of texts whose format alone would let them go on for ever (digits of a second, dots in an address): RFC
3339 with nanoseconds, RFC 5321, RFC 1035, and what browsers take. A small model gets lost in them.
"""
FORMATS = LONGEST_FORMATS.keys() | {"date", "ipv4", "ipv6", "uuid"}
"""Those that are kept to. Others say nothing about what is valid, as JSON Schema has it."""
_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = f"^({_YEAR}-(0[13-9]|1[0-2])|{_YEAR}-02-(0[1-9]|1[0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
"""How a day that exists begins, as far as llguidance leaves that open: no year 0, no leap day without a leap year."""
_VALUES = ("const", "enum", "default", "examples")
_INVERTING = ("oneOf", "not", "if")
_COMBINING = ("allOf", "unevaluatedProperties", "dependentSchemas", "minProperties", "propertyNames")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written: as most programs write it, with no white space to get lost in."""


def of_any_object() -> str:
    """Any JSON object."""
    return of_schema({"type": "object"})


def of_schema(schema: Any) -> str:
    """JSON that a schema allows. Raises UsageError for what is no schema, or too large."""
    from llguidance import LLMatcher

    if not isinstance(schema, Mapping | bool):
        raise UsageError("a JSON schema is an object")
    if schema is False:
        raise UsageError("the schema allows nothing")
    bounded(schema)
    text = json.dumps({} if schema is True else practical(schema))
    return str(LLMatcher.grammar_from_json_schema(text, overrides=SEPARATORS))  # type: ignore[arg-type]


def of_regex(pattern: str) -> str:
    """Text that a regular expression matches whole. Raises UsageError."""
    from llguidance import LLMatcher

    if not isinstance(pattern, str) or not pattern:
        raise UsageError("a regular expression is a text that is not empty")
    if len(pattern) > MOST_REGEX:
        raise UsageError(f"a regular expression has at most {MOST_REGEX} characters, not {len(pattern)}")
    return str(LLMatcher.grammar_from_regex(pattern))


def of_choice(choices: Sequence[str]) -> str:
    """One of some texts. Raises UsageError."""
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
        raise UsageError("a choice is a list of texts")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise UsageError("a choice is a list of texts, none of them empty")
    return of_lark("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def of_lark(text: str) -> str:
    """Text that a grammar in Lark's notation allows, as llguidance reads it. Raises UsageError."""
    from llguidance import LLMatcher

    if not isinstance(text, str) or not text.strip():
        raise UsageError("a grammar is a text that is not empty")
    if len(text) > MOST_CHARACTERS:
        raise UsageError(f"a grammar has at most {MOST_CHARACTERS} characters, not {len(text)}")
    return str(LLMatcher.grammar_from_lark(text))


@dataclass(frozen=True, slots=True)
class Part:
    """JSON by a schema, with its own text before and after it."""

    before: str
    schema: Mapping[str, Any]
    after: str


def of_parts(
    parts: Sequence[Part], begin: str, between: str, end: str, special: Mapping[str, int], *, several: bool
) -> str:
    """One of some parts, or, if `several`, any number of them with something `between`, after `begin`, before `end`.

    `special` are texts that are tokens of their own, which can be written in no other way.
    """
    more = f" ({_literal(between, special)} any)*" if several else ""
    start = f"start: {_literal(begin, special)} any{more} {_literal(end, special)}"
    return of_lark("\n".join([start, *_rules(parts, special)]))


def of_parts_in_text(
    parts: Sequence[Part], trigger: str, special: Mapping[str, int], begin: str = "", between: str = "", end: str = "",
    free: Sequence[int] = (),
) -> str:  # fmt: skip
    """Any text, in which whatever begins with `trigger` is one of some parts, all of which do.

    With a `begin`, which does instead of them, it is any number of them with something `between`, before `end`. The
    text may have tokens that are `free`.
    """
    rest = [Part(part.before.removeprefix(trigger), part.schema, part.after) for part in parts]
    calls = "any"
    if begin:
        before, after = _literal(begin.removeprefix(trigger), special), _literal(end, special)
        calls = f"{before} any ({_literal(between, special)} any)* {after}"
    opened = f"(opened | TEXT <[{special[trigger]}]>)" if trigger in special else "opened"  # letters can spell it, too
    tags = [f"{opened} {calls}", *(f"TEXT <[{token}]>" for token in free)]
    rules = ["start: tag* TEXT", f"opened[lazy]: TEXT {_literal(trigger, {})}", f"tag: {' | '.join(tags)}"]
    return of_lark("\n".join([*rules, "TEXT: /(.|\\n)*/", *_rules(rest, special)]))


def _rules(parts: Sequence[Part], special: Mapping[str, int]) -> list[str]:
    rules = ["any: " + " | ".join(f"part{number}" for number in range(len(parts)))]
    for number, part in enumerate(parts):
        bounded(part.schema)
        schema = json.dumps({**practical(part.schema), "x-guidance": SEPARATORS})
        before, after = _literal(part.before, special), _literal(part.after, special)
        rules += [f"part{number}: {before} json{number} {after}", f"json{number}: %json {schema}"]
    return rules


def _literal(text: str, special: Mapping[str, int]) -> str:
    """A text as Lark writes it, special tokens by their number."""
    names = sorted(special, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return " ".join(
        f"<[{special[piece]}]>" if piece in special else json.dumps(piece, ensure_ascii=False)
        for piece in pieces
        if piece
    )


def bounded(schema: Any) -> None:
    """Raise UsageError for JSON that is too deep or too large, or has a pattern that is."""
    nodes, layer = 0, [schema]
    for _ in range(MOST_DEPTH):
        inner: list[Any] = []
        for value in layer:
            nodes += 1
            if isinstance(value, Mapping):
                inner += value.values()
                patterns = [value.get("pattern"), *(value.get("patternProperties") or {})]
                if any(isinstance(pattern, str) and len(pattern) > MOST_REGEX for pattern in patterns):
                    raise UsageError(f"a pattern in a schema has at most {MOST_REGEX} characters")
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, str) and len(value) > MOST_CHARACTERS:
                raise UsageError(f"a text in a schema has at most {MOST_CHARACTERS} characters")
        if nodes + len(inner) > MOST_NODES:
            raise UsageError(f"a schema has at most {MOST_NODES} values")
        if not inner:
            return
        layer = inner
    raise UsageError(f"a schema is nested at most {MOST_DEPTH} levels deep")


def practical(schema: Any) -> Any:
    """A schema that allows no more than the given one, and in which a model gets lost less easily.

    Texts of every format come to an end, days exist, formats that nobody checks are left out, and an object that names
    properties and does not speak of others has only those, as with other servers. Not so where schemas are combined:
    closed ones would contradict one another, and where only one may hold, or none, less of it would be more of the
    whole.
    """
    levels = list(_levels(schema))
    narrow = not any(key in level for level in levels for key in _INVERTING)
    return _practical(schema, narrow, narrow and not any(map(_combined, levels)))


def _levels(schema: Any) -> Iterator[Mapping[str, Any]]:
    """All schemas within a schema, itself included; values and names are none."""
    if isinstance(schema, list):
        for part in schema:
            yield from _levels(part)
    elif isinstance(schema, Mapping):
        yield schema
        for key, value in schema.items():
            if key in _NAMED and isinstance(value, Mapping):
                yield from _levels(list(value.values()))
            elif key not in _VALUES:
                yield from _levels(value)


def _combined(level: Mapping[str, Any]) -> bool:
    """Whether what an object may have is said in more places than one."""
    places = ("properties" in level or "required" in level, "anyOf" in level, "$ref" in level)
    return sum(places) + ("const" in level or "enum" in level) > 1 or any(key in level for key in _COMBINING)


def _practical(schema: Any, narrow: bool, close: bool) -> Any:
    if isinstance(schema, list):
        return [_practical(part, narrow, close) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _VALUES:
            made[key] = value
        elif key in _NAMED and isinstance(value, Mapping):
            made[key] = {name: _practical(inner, narrow, close) for name, inner in value.items()}
        else:
            made[key] = _practical(value, narrow, close)
    if isinstance(name := schema.get("format"), str):
        longest = LONGEST_FORMATS.get(name)
        if name not in FORMATS:
            del made["format"]
        elif narrow and longest is not None and "maxLength" not in schema and _least(schema) <= longest:
            made["maxLength"] = longest
        if narrow and name in ("date", "date-time") and "pattern" not in schema:
            made["pattern"] = _DAY
    if close and _closes(schema):
        made.setdefault("additionalProperties", False)
    return made


def _least(schema: Mapping[str, Any]) -> int:
    least = schema.get("minLength", 0)
    return least if isinstance(least, int) else 0


def _closes(schema: Mapping[str, Any]) -> bool:
    """Whether an object can do with the properties that its schema names."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not properties or "patternProperties" in schema:
        return False
    return isinstance(required, list) and all(isinstance(name, str) and name in properties for name in required)


def limits() -> LLParserLimits:
    """How much work a grammar may make, when it is compiled and at every token."""
    from llguidance._lib import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, max_lexer_states=100_000, max_grammar_size=200_000
    )


def matcher_of(tokenizer: LLTokenizer, grammar: str, bounds: LLParserLimits) -> LLMatcher:
    """Compile a grammar. Raises UsageError with what is wrong with it."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=bounds)
    if matcher.is_error():
        raise UsageError(problem(matcher.get_error()))
    return matcher


def goes_back(matcher: LLMatcher) -> bool:
    """Whether a grammar, at its beginning, can take back a token: those with stop= or max_tokens= cannot."""
    trial = matcher.deep_copy()
    allowed = np.frombuffer(trial.compute_bitmask(), np.uint8)
    tokens = np.flatnonzero(np.unpackbits(allowed, bitorder="little"))
    return bool(len(tokens)) and trial.consume_token(int(tokens[0])) and trial.rollback(1)


def problem(message: str) -> str:
    """llguidance's word in one line, without the places in its own source."""
    first = re.split(r"\n|<state>|\{\s*\"", message.strip())[0].strip()[:300]
    if first.endswith(":") and (cause := re.search(r"^error: (.{1,200})", message, re.MULTILINE)):
        first += f" {cause[1]}"
    return f"the grammar cannot be used: {first}"
