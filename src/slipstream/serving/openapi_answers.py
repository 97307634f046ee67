"""What answers look like, for the OpenAPI document: closed schemas, so that a field that is not here shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.serving.openapi_shapes import (
    ANY,
    COUNT,
    FLAG,
    NUMBER,
    OPEN,
    TEXT,
    Schema,
    closed_object,
    list_of,
    one_of,
    or_null,
    ref,
)  # fmt: skip

_TOP = closed_object({"token": TEXT, "logprob": NUMBER, "bytes": list_of(COUNT)})
_CHAT_LOGPROBS = closed_object(
    {
        "content": list_of(
            closed_object({"token": TEXT, "logprob": NUMBER, "bytes": list_of(COUNT), "top_logprobs": list_of(_TOP)})
        )
    }
)
_COMPLETION_LOGPROBS = closed_object({
    "tokens": list_of(TEXT), "token_logprobs": list_of(NUMBER), "top_logprobs": list_of(OPEN),
    "text_offset": list_of(COUNT),
})  # fmt: skip
_CALL = closed_object(
    {"id": TEXT, "type": one_of("function"), "function": closed_object({"name": TEXT, "arguments": TEXT})}
)  # fmt: skip
_MESSAGE = closed_object(
    {"role": one_of("assistant"), "content": or_null(TEXT), "refusal": or_null(TEXT)},
    {"reasoning_content": TEXT, "reasoning": TEXT, "tool_calls": list_of(_CALL)},
)
_STOP: Schema = {"type": ["string", "integer", "null"]}
_USAGE = closed_object({
    "prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT,
    "prompt_tokens_details": closed_object({"cached_tokens": COUNT}),
    "completion_tokens_details": closed_object({
        "accepted_prediction_tokens": COUNT, "rejected_prediction_tokens": COUNT, "reasoning_tokens": COUNT
    }),
})  # fmt: skip


def _answer(kind: str, choice: Schema) -> Schema:
    """One of OpenAI's first two protocols."""
    head = {"id": TEXT, "object": one_of(kind), "created": COUNT, "model": TEXT}
    return closed_object({**head, "choices": list_of(choice), "usage": ref("Usage")}, {"timings": list_of(OPEN)})


_CHAT_CHOICE = closed_object({
    "index": COUNT, "message": _MESSAGE, "logprobs": or_null(_CHAT_LOGPROBS),
    "finish_reason": one_of("stop", "length", "tool_calls"), "stop_reason": _STOP,
})  # fmt: skip
_COMPLETION_CHOICE = closed_object({
    "index": COUNT, "text": TEXT, "logprobs": or_null(_COMPLETION_LOGPROBS),
    "finish_reason": one_of("stop", "length"), "stop_reason": _STOP,
})  # fmt: skip
_OUTPUT_TEXT = closed_object({
    "type": one_of("output_text"), "text": TEXT, "annotations": list_of(ANY), "logprobs": list_of(ANY)
})  # fmt: skip
_REASONING_TEXT = closed_object({"type": one_of("reasoning_text"), "text": TEXT})
_ITEM: Schema = {"anyOf": [
    closed_object({"id": TEXT, "status": TEXT, "type": one_of("message"), "role": one_of("assistant"),
             "content": list_of(_OUTPUT_TEXT)}),
    closed_object({"id": TEXT, "status": TEXT, "type": one_of("reasoning"), "summary": list_of(ANY),
             "content": list_of(_REASONING_TEXT)}),
    closed_object({"id": TEXT, "status": TEXT, "type": one_of("function_call"), "call_id": TEXT, "name": TEXT,
             "arguments": TEXT}),
]}  # fmt: skip
_RESPONSE_USAGE = closed_object({
    "input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT,
    "input_tokens_details": closed_object({"cached_tokens": COUNT}),
    "output_tokens_details": closed_object({"reasoning_tokens": COUNT}),
})  # fmt: skip
_BLOCK: Schema = {"anyOf": [
    closed_object({"type": one_of("text"), "text": TEXT}),
    closed_object({"type": one_of("thinking"), "thinking": TEXT, "signature": TEXT}),
    closed_object({"type": one_of("tool_use"), "id": TEXT, "name": TEXT, "input": OPEN}),
]}  # fmt: skip
_CARD = closed_object(
    {"id": TEXT, "object": one_of("model"), "owned_by": TEXT, "created": COUNT},
    {"max_model_len": COUNT, "numerics": TEXT, "kv_cache_dtype": TEXT, "weight_bytes": COUNT,
     "ceiling_tok_s": or_null(NUMBER)},
)  # fmt: skip
_DRAFTER_ROW = closed_object({"drafter": TEXT, "tag": TEXT, "verifications": COUNT, "tau": NUMBER})

COMPONENTS: Mapping[str, Schema] = {
    "Usage": _USAGE,
    "ChatCompletion": _answer("chat.completion", _CHAT_CHOICE),
    "TextCompletion": _answer("text_completion", _COMPLETION_CHOICE),
    "Response": closed_object({
        "id": TEXT, "object": one_of("response"), "created_at": COUNT, "model": TEXT, "error": or_null(OPEN),
        "status": one_of("completed", "incomplete"), "output": list_of(_ITEM), "usage": _RESPONSE_USAGE,
        "incomplete_details": or_null(closed_object({"reason": TEXT})), "instructions": or_null(TEXT),
        "max_output_tokens": or_null(COUNT), "parallel_tool_calls": FLAG, "previous_response_id": or_null(TEXT),
        "reasoning": OPEN, "store": FLAG, "temperature": NUMBER, "text": OPEN, "tool_choice": ANY,
        "tools": list_of(OPEN), "top_p": NUMBER, "truncation": TEXT, "metadata": OPEN, "user": or_null(TEXT),
    }, {"timings": list_of(OPEN)}),
    "Deleted": closed_object({"id": TEXT, "object": one_of("response"), "deleted": FLAG}),
    "Message": closed_object({
        "id": TEXT, "type": one_of("message"), "role": one_of("assistant"), "model": TEXT, "content": list_of(_BLOCK),
        "stop_reason": one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        "stop_sequence": or_null(TEXT), "usage": closed_object({
            "input_tokens": COUNT, "cache_read_input_tokens": COUNT, "cache_creation_input_tokens": COUNT,
            "output_tokens": COUNT,
        }),
    }, {"timings": list_of(OPEN)}),
    "Embeddings": closed_object({
        "object": one_of("list"), "model": TEXT,
        "data": list_of(closed_object({
            "object": one_of("embedding"), "index": COUNT, "embedding": {"anyOf": [TEXT, list_of(NUMBER)]}
        })),
        "usage": closed_object({"prompt_tokens": COUNT, "total_tokens": COUNT}),
    }),
    "Model": _CARD,
    "Models": closed_object({"object": one_of("list"), "data": list_of(ref("Model"))}),
    "Tokens": closed_object({"tokens": list_of(COUNT), "count": COUNT, "max_model_len": or_null(COUNT)}),
    "Text": closed_object({"prompt": TEXT}),
    "TokenCount": closed_object({"input_tokens": COUNT}),
    "Version": closed_object({"version": TEXT}),
    "Health": closed_object({"status": TEXT}),
    "Explained": {"type": "object", "required": ["model", "parts"]},
    "Drafters": closed_object(
        {
            "present": or_null(TEXT), "kv_cache_dtype": TEXT, "quantization": TEXT, "rollout": or_null(OPEN),
            "drafters": list_of(_DRAFTER_ROW),
        },
        {"warnings": list_of(TEXT)},
    ),
    "Activity": closed_object({"open": COUNT, "begun": COUNT}),
    "Error": closed_object({"error": closed_object({
        "message": TEXT, "type": TEXT, "param": or_null(TEXT), "code": or_null(TEXT)
    })}),
    "MessagesError": closed_object({"type": one_of("error"), "error": closed_object({"type": TEXT, "message": TEXT})}),
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
    ("get", "/admin/activity"): "Activity",
}  # fmt: skip
"""The schema of what a method of a route answers with 200. What is not here is text, or the document itself."""
STREAMED = ("ChatCompletion", "TextCompletion", "Response", "Message")
"""Answers that come as a stream of events if that is asked for."""


def content_of(method: str, path: str, status: str) -> dict[str, Any]:
    """The `content` of an answer in the document."""
    if status != "200":
        if (path, status) == ("/health", "503"):
            return {"application/json": {"schema": ref("Health")}}
        error = "MessagesError" if path.startswith("/v1/messages") else "Error"
        return {"application/json": {"schema": ref(error)}}
    if path == "/metrics":
        return {"text/plain": {"schema": TEXT}}
    name = ANSWERS.get((method, path))
    if name is None:
        return {"application/json": {"schema": OPEN}}
    content = {"application/json": {"schema": ref(name)}}
    if method == "post" and name in STREAMED:
        content["text/event-stream"] = {"schema": closed_object({"data": TEXT}, {"event": TEXT})}
    return content
