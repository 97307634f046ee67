"""The words that schemas of the OpenAPI document are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
SECONDS: Schema = {"type": "number", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
ANY: Schema = {}
OPEN: Schema = {"type": "object"}


def or_null(schema: Schema) -> Schema:
    """The same, or nothing."""
    return {"anyOf": [schema, {"type": "null"}]}


def any_of(*schemas: Schema) -> Schema:
    """One of several."""
    return {"anyOf": list(schemas)}


def one_of(*values: str) -> Schema:
    """One of some words."""
    return {"type": "string", "enum": list(values)}


def words(least: int = 1, most: int | None = None) -> Schema:
    """A text of so many characters."""
    return {"type": "string", "minLength": least} | ({} if most is None else {"maxLength": most})


def whole(low: int, high: int) -> Schema:
    """An integer in a range."""
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float) -> Schema:
    """A number in a range."""
    return {"type": "number", "minimum": low, "maximum": high}


def list_of(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    """A list of so many."""
    bounds = ({"minItems": least} if least else {}) | ({} if most is None else {"maxItems": most})
    return {"type": "array", "items": items} | bounds


def ref(name: str) -> Schema:
    """A schema that has a name."""
    return {"$ref": f"#/components/schemas/{name}"}


def open_object(fields: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object with all of `fields`, perhaps `optional` ones, and whatever else."""
    return {"type": "object", "properties": {**fields, **(optional or {})}, "required": sorted(fields)}


def closed_object(fields: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object with all of `fields`, perhaps `optional` ones, and nothing else."""
    return open_object(fields, optional) | {"additionalProperties": False}
