"""Schemas made at random, like those that people want kept to: nested, enums, patterns, numbers, references."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

WORDS = (
    "name", "title", "city", "street", "country", "email", "price", "amount", "count", "status", "kind", "code",
    "items", "tags", "notes", "score", "level", "start", "end", "owner", "team", "colour", "size", "weight", "parts",
)  # fmt: skip
PATTERNS = (
    "^[A-Z]{2}[0-9]{4}$", "^[a-z]{3,8}$", "^[0-9]{4}-[0-9]{2}-[0-9]{2}$", "^(red|green|blue)-[1-9]$", "^#[0-9a-f]{6}$",
    "^[A-Za-z0-9_]{1,12}$", "^v[0-9]\\.[0-9]{1,2}$",
)  # fmt: skip
FORMATS = ("date", "time", "uuid", "ipv4", "email")
DEEPEST = 4


def schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """So many, each an object; the same for one seed. What could go on for ever is bounded."""
    rng = random.Random(seed)
    return [_document(rng) for _ in range(count)]


def _document(rng: random.Random) -> dict[str, Any]:
    schema = _object(rng, 0)
    if rng.random() < 0.35:
        schema["$defs"] = {"part": _object(rng, DEEPEST - 1), "word": _word(rng)}
        names = list(schema["properties"])
        schema["properties"][rng.choice(names)] = {"$ref": "#/$defs/part"}
        schema["properties"]["more"] = {"type": "array", "items": {"$ref": "#/$defs/word"}, "maxItems": 3}
        schema["required"] = [*dict.fromkeys([*schema["required"], "more"])]
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 5 - depth))
    required = [name for name in names if rng.random() < 0.8] or names[:1]
    return {
        "type": "object", "properties": {name: _value(rng, depth + 1) for name in names}, "required": required,
        "additionalProperties": False,
    }  # fmt: skip


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds: list[Callable[[random.Random, int], dict[str, Any]]] = [_word, _number, _number, _enum, _flag]
    if depth < DEEPEST:
        kinds += [_list, _nested, _either]
    return rng.choice(kinds)(rng, depth)


def _word(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    match rng.randrange(4):
        case 0:
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case 1:
            return {"type": "string", "format": rng.choice(FORMATS)}
        case 2:
            return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(4, 16)}
        case _:
            return {"type": ["string", "null"], "maxLength": rng.randint(4, 16)}


def _number(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    high = low + rng.choice([1, 9, 100, 5000])
    match rng.randrange(4):
        case 0:
            return {"type": "integer", "minimum": low, "maximum": high}
        case 1:
            return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 2}
        case 2:
            return {
                "type": "integer",
                "minimum": 0,
                "maximum": 100 * rng.randint(1, 9),
                "multipleOf": rng.choice([5, 10]),
            }
        case _:
            return {"type": "number", "minimum": low, "maximum": high}


def _enum(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    values: list[Any] = [*rng.sample(WORDS, rng.randint(2, 4)), *rng.sample([1, 2.5, None, True], rng.randint(0, 2))]
    return {"enum": values} if rng.random() < 0.8 else {"const": rng.choice(values)}


def _flag(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    return {"type": "boolean"}


def _list(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {
        "type": "array", "items": _value(rng, depth + 1), "minItems": least, "maxItems": least + rng.randint(1, 2)
    }  # fmt: skip


def _nested(rng: random.Random, depth: int) -> dict[str, Any]:
    return _object(rng, depth)


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_word(rng), _number(rng), _object(rng, DEEPEST - 1)][: rng.randint(2, 3)]}
