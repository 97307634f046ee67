"""The OpenAPI document: every route, what it answers, what it takes: from the very types requests are read into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from slipstream import __version__
from slipstream.serving.admin import DeployBody
from slipstream.serving.embeddings import EmbeddingsRequest
from slipstream.serving.messages import MessagesRequest
from slipstream.serving.openai import ChatRequest, CompletionRequest
from slipstream.serving.openapi_answers import COMPONENTS, content_of
from slipstream.serving.responses import ResponsesRequest

BODIES: Mapping[str, tuple[str, type[Any]]] = {
    "/v1/chat/completions": ("A chat's answer, whole or as a stream of events.", ChatRequest),
    "/v1/completions": ("A text's continuation, whole or as a stream of events.", CompletionRequest),
    "/v1/responses": ("A response, whole or as a stream of events.", ResponsesRequest),
    "/v1/messages": ("A message, as Anthropic's clients ask for it.", MessagesRequest),
    "/v1/embeddings": ("Texts as vectors.", EmbeddingsRequest),
}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_MESSAGES = {"type": "array", "items": {"type": "object"}, "minItems": 1}
_PROMPTS = {"anyOf": [{"type": "string"}, _TEXTS, _TOKENS, {"type": "array", "items": _TOKENS, "minItems": 1}]}
NEEDED: Mapping[str, tuple[str, Any]] = {
    "ChatRequest": ("messages", _MESSAGES), "CompletionRequest": ("prompt", _PROMPTS),
    "MessagesRequest": ("messages", _MESSAGES), "EmbeddingsRequest": ("input", _PROMPTS),
    "ResponsesRequest": ("input", {"anyOf": [{"type": "string"}, _MESSAGES]}),
}  # fmt: skip
"""What each body cannot do without. The types that are read let more through, so that errors can say more."""
OBJECTS: Mapping[str, tuple[str, Any]] = {
    "/v1/messages/count_tokens": (
        "How many tokens a message's prompt has.",
        {"type": "object", "properties": {"messages": _MESSAGES}, "required": ["messages"]},
    ),
    "/tokenize": (
        "A text or messages as token ids.",
        {
            "type": "object", "properties": {"prompt": {"type": "string"}, "messages": _MESSAGES},
            "anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
        },
    ),
    "/detokenize": (
        "Token ids as text.",
        {"type": "object", "properties": {"tokens": {**_TOKENS, "minItems": 0}}, "required": ["tokens"]},
    ),
}  # fmt: skip
LOOKS = {
    "/v1/models": "The one model.", "/metrics": "Prometheus's text.", "/explain": "Where users' time goes.",
    "/version": "The program's version.", "/health": "Whether it is well.", "/openapi.json": "This document.",
}  # fmt: skip
STATUSES = {
    "200": "What was asked for.", "400": "The request is at fault; the error names the field.",
    "401": "A key is needed.", "403": "The key may not.", "409": "There is too little to tell from.",
    "404": "There is no such model, or thing.", "408": "The body did not arrive.", "413": "The body is too large.",
    "429": "Too many requests.", "503": "The engine is not there, for now.", "504": "It took too long.",
}  # fmt: skip


def document() -> dict[str, Any]:
    """The document as an object."""
    types = [kind for _, kind in BODIES.values()] + [DeployBody]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_path = dict(zip([*BODIES, "/admin/drafter"], schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, (what, _) in BODIES.items():
        paths[path] = {"post": _operation(what, by_path[path])}
    for name, (field, shape) in NEEDED.items():
        components[name]["properties"][field] = shape
        components[name]["required"] = sorted({*components[name].get("required", ()), field})
    for path, (what, body) in OBJECTS.items():
        paths[path] = {"post": _operation(what, body)}
    for path, what in LOOKS.items():
        paths[path] = {"get": _operation(what)}
    paths["/v1/responses/{id}"] = {
        "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
        "get": _operation("A response that was made lately."), "delete": _operation("Forget a response."),
    }  # fmt: skip
    paths["/v1/models/{id}"] = {
        "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
        "get": _operation("The one model, by its name."),
    }
    paths["/admin/drafter"] = {
        "get": _operation("How drafters fare."),
        "post": _operation("Deploy a drafter, change its stage, take it back.", by_path["/admin/drafter"]),
    }
    for path, operations in paths.items():
        for method in operations.keys() - {"parameters"}:
            for status, answer in operations[method]["responses"].items():
                answer["content"] = content_of(method, path, status)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components | dict(COMPONENTS),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def _operation(what: str, body: Any = None) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": what, "responses": {status: {"description": text} for status, text in STATUSES.items()}
    }  # fmt: skip
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
