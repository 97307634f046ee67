"""The OpenAPI document: every route, what it answers, what it takes: from the very types requests are read into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from slipstream import __version__
from slipstream.serving import openapi_requests
from slipstream.serving.admin import DeployBody
from slipstream.serving.embeddings import EmbeddingsRequest
from slipstream.serving.messages import MessagesRequest
from slipstream.serving.openai import ChatRequest, CompletionRequest
from slipstream.serving.openapi_answers import COMPONENTS, content_of
from slipstream.serving.openapi_shapes import COUNT, FLAG, SECONDS, TEXT, any_of, open_object, or_null, ref
from slipstream.serving.responses import ResponsesRequest

BODIES: Mapping[str, tuple[str, type[Any]]] = {
    "/v1/chat/completions": ("A chat's answer, whole or as a stream of events.", ChatRequest),
    "/v1/completions": ("A text's continuation, whole or as a stream of events.", CompletionRequest),
    "/v1/responses": ("A response, whole or as a stream of events.", ResponsesRequest),
    "/v1/messages": ("A message, as Anthropic's clients ask for it.", MessagesRequest),
    "/v1/embeddings": ("Texts as vectors.", EmbeddingsRequest),
}
LESS = "CountTokensRequest"
"""A message that is only counted: the same, but without what its answer needs."""
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


def document(served_name: str | None = None, vocabulary: int | None = None) -> dict[str, Any]:
    """The document as an object, for a server of this model, with token ids below this."""
    types = [kind for _, kind in BODIES.values()] + [DeployBody]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_path = dict(zip([*BODIES, "/admin/drafter"], schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, (what, _) in BODIES.items():
        paths[path] = {"post": _operation(what, by_path[path])}
    for name, shown in openapi_requests.fields(served_name, vocabulary).items():
        _say_more(components[name], shown, openapi_requests.NEEDED[name])
    counted = components["MessagesRequest"]
    components[LESS] = counted | {"required": sorted({*counted["required"]} - {"max_tokens"})}
    chat = {name: components["ChatRequest"]["properties"][name] for name in openapi_requests.SHOWN}
    chatting = open_object({}, chat) | {"required": ["messages"]}
    prompt = open_object({"prompt": TEXT}, {"add_special_tokens": FLAG})
    tokens = openapi_requests.tokens_of(vocabulary) | {"minItems": 0}
    for path, what, body in (
        ("/v1/messages/count_tokens", "How many tokens a message's prompt has.", ref(LESS)),
        ("/tokenize", "A text or messages as token ids.", any_of(prompt, chatting)),
        ("/detokenize", "Token ids as text.", open_object({"tokens": tokens})),
    ):
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
    paths["/admin/activity"] = {
        "parameters": [
            {"name": name, "in": "query", "schema": kind} for name, kind in (("since", COUNT), ("wait", SECONDS))
        ],
        "get": _operation("Requests that are open, and that have begun; waits for the next one if asked to."),
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
            "schemas": components | dict(openapi_requests.SHAPES) | dict(COMPONENTS),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def _say_more(component: dict[str, Any], shown: openapi_requests.Fields, needed: str) -> None:
    """Put what is known of its fields into the schema of a type."""
    properties = component["properties"]
    required = component["required"] = sorted({*component.get("required", ()), needed})
    for field, shape in shown.items():
        properties[field] = shape if field in required else properties[field] | or_null(shape)


def _operation(what: str, body: Any = None) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": what, "responses": {status: {"description": text} for status, text in STATUSES.items()}
    }  # fmt: skip
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
