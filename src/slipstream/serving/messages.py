"""Anthropic's messages: their requests as chats, and chats' answers as their messages, whole or streamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slipstream.engine.messages import RequestTimings
from slipstream.engine.output import Chunk
from slipstream.serving.answers import Answer, frame, timings_of, usage_of
from slipstream.serving.chats import Names
from slipstream.serving.errors import ApiError, bad_request
from slipstream.serving.openai import ChatRequest
from slipstream.serving.parts import Change, Part, Parts

KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}  # fmt: skip
"""What errors are called, by status."""
THINKING = ("enabled", "adaptive", "disabled")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages."""

    messages: list[dict[str, Any]]
    max_tokens: int
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    seed: int | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    timings: bool | None = None


UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "mcp_servers": (None, []),
    "container": (None,),
    "context_management": (None,),
}
"""Fields of this protocol that would change the answer and are not there yet, with what asks for nothing."""


def as_chat(body: MessagesRequest) -> ChatRequest:
    """The same as a chat. Raises ApiError for what has no counterpart."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{index}]")
    choice = body.tool_choice or {}
    parallel = choice.get("disable_parallel_tool_use", False)
    if not isinstance(parallel, bool):
        raise bad_request("tool_choice.disable_parallel_tool_use is true or false", "tool_choice")
    return ChatRequest(
        messages=messages, max_tokens=body.max_tokens, stop=body.stop_sequences, stream=body.stream,
        temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, seed=body.seed, timings=body.timings,
        tools=[_tool(tool, f"tools[{n}]") for n, tool in enumerate(body.tools or ())] or None,
        tool_choice=_choice(body.tool_choice), parallel_tool_calls=not parallel,
        chat_template_kwargs=_thinking(body.thinking),
        response_format=_response_format(body),
    )  # fmt: skip


def names_of(body: MessagesRequest) -> Names:
    """What this client calls the fields of a chat that say what form its answer has."""
    named = (body.output_config or {}).get("format") is not None
    return Names("output_config.format" if named else "output_format", "input_schema")


def _response_format(body: MessagesRequest) -> dict[str, Any] | None:
    """The schema that the answer has to keep to, as OpenAI says it."""
    field, wanted = names_of(body).form, (body.output_config or {}).get("format")
    if wanted is None:
        wanted = body.output_format
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise bad_request(f"{field} is of type json_schema", field)
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.get("schema")}}


def _messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """One message of theirs as one or more of a chat: results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{where}.role is user or assistant", f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise bad_request(f"{where}.content is a text or a list of blocks", f"{where}.content")
    results, texts, calls = [], [], []
    for block in content:
        match block.get("type"):
            case "text":
                texts.append(_of(block, "text", str, where))
            case "tool_result":
                result = "" if block.get("content") is None else _text(block["content"], f"{where}.content")
                called = _of(block, "tool_use_id", str, where)
                results.append({"role": "tool", "tool_call_id": called, "content": result})
            case "tool_use":
                name, arguments = _of(block, "name", str, where), _of(block, "input", dict, where)
                function = {"name": name, "arguments": arguments}
                calls.append({"id": _of(block, "id", str, where), "type": "function", "function": function})
            case "thinking" | "redacted_thinking":
                continue  # thoughts of earlier turns are not said again
            case other:
                raise bad_request(f"{where}: blocks of type {str(other)[:40]!r} are not supported", f"{where}.content")
    said = {"role": role, "content": "".join(texts)}
    if calls:
        return [*results, {**said, "tool_calls": calls}]
    return [*results, said] if texts or not results else results


def _of(block: Mapping[str, Any], name: str, kind: type[Any], where: str) -> Any:
    """What a block has to say. Raises ApiError."""
    value = block.get(name)
    if not isinstance(value, kind):
        what = "a text" if kind is str else "an object"
        raise bad_request(f"{where}: a block of type {block['type']} needs {name}, {what}", f"{where}.{name}")
    return value


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(b, Mapping) and b.get("type") == "text" for b in content):
        return "".join(_of(block, "text", str, where) for block in content)
    raise bad_request(f"{where} is a text or blocks of type text", where)


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise bad_request(f"{where}: tools that the server itself runs are not supported", where)
    function = {key: tool[key] for key in ("name", "description", "strict") if key in tool}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def _choice(choice: Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in CHOICES:
        raise bad_request("tool_choice is of type auto, any, tool or none", "tool_choice")
    return CHOICES[kind]


def _thinking(thinking: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if thinking is None:
        return None
    if thinking.get("type") not in THINKING:
        raise bad_request(f"thinking is of type {', '.join(THINKING)}", "thinking.type")
    return {"enable_thinking": thinking["type"] != "disabled"}


def is_theirs(path: str) -> bool:
    """Whether only their clients ask for this path."""
    return f"{path}/".startswith("/v1/messages/")


def error_body(error: ApiError) -> bytes:
    """An error as their clients expect it."""
    return msgspec.json.encode(_error(error))


def _error(error: ApiError) -> dict[str, Any]:
    kind = KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


@dataclass
class MessagesAnswer(Answer):
    """A message."""

    prompt_tokens: int = 0
    parts: Parts = field(default_factory=Parts)
    _open: bool = False

    def add(self, chunk: Chunk) -> None:
        """Collect a chunk."""
        self._take(chunk)

    def _take(self, chunk: Chunk) -> list[Change]:
        choice = self.choices[0]
        events = choice.take(chunk)
        return self.parts.add(events, [call.id for call in choice.calls])

    def report(self, ended: list[RequestTimings]) -> dict[str, Any]:
        """The whole message."""
        return self._message([_block(part) for part in self.parts], self._usage(ended)) | self._stop()

    def opening(self) -> list[bytes]:
        """The message without content."""
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        message = self._message([], usage) | {"stop_reason": None, "stop_sequence": None}
        return [frame({"type": "message_start", "message": message}, "message_start"), frame({"type": "ping"}, "ping")]

    def frames(self, chunk: Chunk) -> list[bytes]:
        """What a chunk brings, block by block."""
        frames = []
        for index, begun, text in self._take(chunk):
            part = self.parts[index]
            if begun:
                frames += self._closed(index - 1)
                self._open = True
                block = _block(Part(part.kind, part.name, part.id))
                frames.append(_event("content_block_start", index=index, content_block=block))
            if text:
                frames.append(_event("content_block_delta", index=index, delta=_delta(part, text)))
        return frames

    def _closed(self, index: int) -> list[bytes]:
        if not self._open:
            return []
        self._open = False
        return [_event("content_block_stop", index=index)]

    def closing(self, ended: list[RequestTimings], *, usage: bool, timed: bool) -> list[bytes]:
        """Why it ended, and what it took."""
        return [
            *self._closed(len(self.parts) - 1),
            _event("message_delta", delta=self._stop(), usage=self._usage(ended), **timings_of(ended, timed=timed)),
            _event("message_stop"),
        ]

    def failure(self, error: ApiError) -> bytes:
        """A problem in the middle of a stream."""
        return frame(_error(error), "error")

    def _stop(self) -> dict[str, Any]:
        choice = self.choices[0]
        if choice.finish_reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if choice.reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(choice.stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self, ended: Sequence[RequestTimings]) -> dict[str, Any]:
        usage = usage_of(list(ended))
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0, "output_tokens": usage["completion_tokens"],
        }  # fmt: skip

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "usage": usage,
        }  # fmt: skip


def _block(part: Part) -> dict[str, Any]:
    match part.kind:
        case "text":
            return {"type": "text", "text": part.text}
        case "thought":
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        case _:
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": part.arguments}


def _delta(part: Part, text: str) -> dict[str, Any]:
    match part.kind:
        case "text":
            return {"type": "text_delta", "text": text}
        case "thought":
            return {"type": "thinking_delta", "thinking": text}
        case _:
            return {"type": "input_json_delta", "partial_json": text}


def _event(name: str, /, **fields: Any) -> bytes:
    return frame({"type": name, **fields}, name)
