"""What answers look like, for the OpenAPI document: closed schemas, so that a field that is not here shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_FLAG: Schema = {"type": "boolean"}
_ANY: Schema = {}
_OPEN: Schema = {"type": "object"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(fields: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object with all of `fields`, perhaps `optional` ones, and nothing else."""
    return {
        "type": "object", "properties": {**fields, **(optional or {})}, "required": sorted(fields),
        "additionalProperties": False,
    }  # fmt: skip


_TOP = _object({"token": _TEXT, "logprob": _NUMBER, "bytes": _list(_COUNT)})
_CHAT_LOGPROBS = _object(
    {
        "content": _list(
            _object({"token": _TEXT, "logprob": _NUMBER, "bytes": _list(_COUNT), "top_logprobs": _list(_TOP)})
        )
    }
)
_COMPLETION_LOGPROBS = _object({
    "tokens": _list(_TEXT), "token_logprobs": _list(_NUMBER), "top_logprobs": _list(_OPEN), "text_offset": _list(_COUNT)
})  # fmt: skip
_CALL = _object(
    {"id": _TEXT, "type": _one_of("function"), "function": _object({"name": _TEXT, "arguments": _TEXT})}
)  # fmt: skip
_MESSAGE = _object(
    {"role": _one_of("assistant"), "content": _or_null(_TEXT), "refusal": _or_null(_TEXT)},
    {"reasoning_content": _TEXT, "reasoning": _TEXT, "tool_calls": _list(_CALL)},
)
_STOP: Schema = {"type": ["string", "integer", "null"]}
_USAGE = _object({
    "prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT,
    "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
    "completion_tokens_details": _object({
        "accepted_prediction_tokens": _COUNT, "rejected_prediction_tokens": _COUNT, "reasoning_tokens": _COUNT
    }),
})  # fmt: skip


def _answer(kind: str, choice: Schema) -> Schema:
    """One of OpenAI's first two protocols."""
    head = {"id": _TEXT, "object": _one_of(kind), "created": _COUNT, "model": _TEXT}
    return _object({**head, "choices": _list(choice), "usage": _ref("Usage")}, {"timings": _list(_OPEN)})


_CHAT_CHOICE = _object({
    "index": _COUNT, "message": _MESSAGE, "logprobs": _or_null(_CHAT_LOGPROBS),
    "finish_reason": _one_of("stop", "length", "tool_calls"), "stop_reason": _STOP,
})  # fmt: skip
_COMPLETION_CHOICE = _object({
    "index": _COUNT, "text": _TEXT, "logprobs": _or_null(_COMPLETION_LOGPROBS),
    "finish_reason": _one_of("stop", "length"), "stop_reason": _STOP,
})  # fmt: skip
_OUTPUT_TEXT = _object({
    "type": _one_of("output_text"), "text": _TEXT, "annotations": _list(_ANY), "logprobs": _list(_ANY)
})  # fmt: skip
_REASONING_TEXT = _object({"type": _one_of("reasoning_text"), "text": _TEXT})
_ITEM: Schema = {"anyOf": [
    _object({"id": _TEXT, "status": _TEXT, "type": _one_of("message"), "role": _one_of("assistant"),
             "content": _list(_OUTPUT_TEXT)}),
    _object({"id": _TEXT, "status": _TEXT, "type": _one_of("reasoning"), "summary": _list(_ANY),
             "content": _list(_REASONING_TEXT)}),
    _object({"id": _TEXT, "status": _TEXT, "type": _one_of("function_call"), "call_id": _TEXT, "name": _TEXT,
             "arguments": _TEXT}),
]}  # fmt: skip
_RESPONSE_USAGE = _object({
    "input_tokens": _COUNT, "output_tokens": _COUNT, "total_tokens": _COUNT,
    "input_tokens_details": _object({"cached_tokens": _COUNT}),
    "output_tokens_details": _object({"reasoning_tokens": _COUNT}),
})  # fmt: skip
_BLOCK: Schema = {"anyOf": [
    _object({"type": _one_of("text"), "text": _TEXT}),
    _object({"type": _one_of("thinking"), "thinking": _TEXT, "signature": _TEXT}),
    _object({"type": _one_of("tool_use"), "id": _TEXT, "name": _TEXT, "input": _OPEN}),
]}  # fmt: skip
_CARD = _object(
    {"id": _TEXT, "object": _one_of("model"), "owned_by": _TEXT, "created": _COUNT},
    {"max_model_len": _COUNT, "numerics": _TEXT, "kv_cache_dtype": _TEXT, "weight_bytes": _COUNT,
     "ceiling_tok_s": _or_null(_NUMBER)},
)  # fmt: skip
_DRAFTER_ROW = _object({"drafter": _TEXT, "tag": _TEXT, "verifications": _COUNT, "tau": _NUMBER})

COMPONENTS: Mapping[str, Schema] = {
    "Usage": _USAGE,
    "ChatCompletion": _answer("chat.completion", _CHAT_CHOICE),
    "TextCompletion": _answer("text_completion", _COMPLETION_CHOICE),
    "Response": _object({
        "id": _TEXT, "object": _one_of("response"), "created_at": _COUNT, "model": _TEXT, "error": _or_null(_OPEN),
        "status": _one_of("completed", "incomplete"), "output": _list(_ITEM), "usage": _RESPONSE_USAGE,
        "incomplete_details": _or_null(_object({"reason": _TEXT})), "instructions": _or_null(_TEXT),
        "max_output_tokens": _or_null(_COUNT), "parallel_tool_calls": _FLAG, "previous_response_id": _or_null(_TEXT),
        "reasoning": _OPEN, "store": _FLAG, "temperature": _NUMBER, "text": _OPEN, "tool_choice": _ANY,
        "tools": _list(_OPEN), "top_p": _NUMBER, "truncation": _TEXT, "metadata": _OPEN, "user": _or_null(_TEXT),
    }, {"timings": _list(_OPEN)}),
    "Deleted": _object({"id": _TEXT, "object": _one_of("response"), "deleted": _FLAG}),
    "Message": _object({
        "id": _TEXT, "type": _one_of("message"), "role": _one_of("assistant"), "model": _TEXT, "content": _list(_BLOCK),
        "stop_reason": _one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        "stop_sequence": _or_null(_TEXT), "usage": _object({
            "input_tokens": _COUNT, "cache_read_input_tokens": _COUNT, "cache_creation_input_tokens": _COUNT,
            "output_tokens": _COUNT,
        }),
    }, {"timings": _list(_OPEN)}),
    "Embeddings": _object({
        "object": _one_of("list"), "model": _TEXT,
        "data": _list(_object({
            "object": _one_of("embedding"), "index": _COUNT, "embedding": {"anyOf": [_TEXT, _list(_NUMBER)]}
        })),
        "usage": _object({"prompt_tokens": _COUNT, "total_tokens": _COUNT}),
    }),
    "Model": _CARD,
    "Models": _object({"object": _one_of("list"), "data": _list(_ref("Model"))}),
    "Tokens": _object({"tokens": _list(_COUNT), "count": _COUNT, "max_model_len": _or_null(_COUNT)}),
    "Text": _object({"prompt": _TEXT}),
    "TokenCount": _object({"input_tokens": _COUNT}),
    "Version": _object({"version": _TEXT}),
    "Health": _object({"status": _TEXT}),
    "Explained": {"type": "object", "required": ["model", "parts"]},
    "Drafters": _object({"rollout": _or_null(_OPEN), "drafters": _list(_DRAFTER_ROW)}, {"warnings": _list(_TEXT)}),
    "Error": _object({"error": _object({
        "message": _TEXT, "type": _TEXT, "param": _or_null(_TEXT), "code": _or_null(_TEXT)
    })}),
    "MessagesError": _object({"type": _one_of("error"), "error": _object({"type": _TEXT, "message": _TEXT})}),
}  # fmt: skip
"""Schemas by name."""

ANSWERS: Mapping[tuple[str, str], str] = {
    ("post", "/v1/chat/completions"): "ChatCompletion", ("post", "/v1/completions"): "TextCompletion",
    ("post", "/v1/responses"): "Response", ("get", "/v1/responses/{id}"): "Response",
    ("delete", "/v1/responses/{id}"): "Deleted", ("post", "/v1/messages"): "Message",
    ("post", "/v1/messages/count_tokens"): "TokenCount", ("post", "/v1/embeddings"): "Embeddings",
    ("get", "/v1/models"): "Models", ("get", "/v1/models/{id}"): "Model", ("post", "/tokenize"): "Tokens",
    ("post", "/detokenize"): "Text", ("get", "/version"): "Version", ("get", "/health"): "Health",
    ("get", "/explain"): "Explained", ("get", "/admin/drafter"): "Drafters", ("post", "/admin/drafter"): "Drafters",
}  # fmt: skip
"""The schema of what a method of a route answers with 200. What is not here is text, or the document itself."""
STREAMED = ("ChatCompletion", "TextCompletion", "Response", "Message")
"""Answers that come as a stream of events if that is asked for."""


def content_of(method: str, path: str, status: str) -> dict[str, Any]:
    """The `content` of an answer in the document."""
    if status != "200":
        if (path, status) == ("/health", "503"):
            return {"application/json": {"schema": _ref("Health")}}
        error = "MessagesError" if path.startswith("/v1/messages") else "Error"
        return {"application/json": {"schema": _ref(error)}}
    if path == "/metrics":
        return {"text/plain": {"schema": _TEXT}}
    name = ANSWERS.get((method, path))
    if name is None:
        return {"application/json": {"schema": _OPEN}}
    content = {"application/json": {"schema": _ref(name)}}
    if method == "post" and name in STREAMED:
        content["text/event-stream"] = {"schema": _object({"data": _TEXT}, {"event": _TEXT})}
    return content
