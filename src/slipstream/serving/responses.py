"""OpenAI's responses: their requests as chats, chats' answers as their items, whole or streamed, kept for a while."""

from __future__ import annotations

import itertools
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from slipstream.engine.messages import RequestTimings
from slipstream.engine.output import Chunk
from slipstream.serving import openai
from slipstream.serving.answers import Answer, frame, timings_of
from slipstream.serving.chats import Chats, Names
from slipstream.serving.errors import ApiError, bad_request
from slipstream.serving.exchange import Exchange, Wanted
from slipstream.serving.keys import Key
from slipstream.serving.parts import Part, Parts

KEPT, KEPT_BYTES = 1000, 64 << 20
"""Responses that can be gone on with, the latest ones."""
TEXTS = ("input_text", "output_text", "text", "refusal")

UNSUPPORTED = {
    "conversation": (None,), "prompt": (None,), "top_logprobs": (None, 0), "max_tool_calls": (None,),
}  # fmt: skip
"""Fields of this protocol that would change the answer and are not there yet, with what asks for nothing."""


class ResponsesRequest(openai.Common, kw_only=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Kept:
    owner: str
    messages: list[dict[str, Any]]
    report: dict[str, Any]
    size: int


class Responses:
    """Makes responses, and remembers the latest."""

    def __init__(self, chats: Chats, exchange: Exchange, served_name: str):
        self._chats, self._exchange, self._served_name = chats, exchange, served_name
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0

    async def create(self, request: Request, key: Key, data: bytes, known: Callable[[str | None], None]) -> Response:
        """POST /v1/responses; `known` refuses other models. Raises ApiError."""
        body: ResponsesRequest = openai.parse(data, ResponsesRequest, UNSUPPORTED)
        known(body.model)
        openai.finite(body)
        for name, value, harmless in (("truncation", body.truncation, (None, "disabled")), ("n", body.n, (None, 1)),
                                      ("background", body.background, (None, False))):  # fmt: skip
            if value not in harmless:
                raise bad_request(f"{name} is not supported", name)
        messages = self._before(key, body.previous_response_id) + messages_of(body.input)
        chat_request = _as_chat(body, messages)
        named = (body.text or {}).get("format") is not None
        names = Names("text.format" if named else "response_format", "parameters")
        chat = await self._chats.prepare(chat_request, names)
        answer = ResponsesAnswer(
            f"resp_{uuid.uuid4().hex}", self._served_name, self._chats.prompts.tokenizer, 1, chat.reading
        )  # fmt: skip
        answer.asked = _echoed(body)
        if body.store is not False:
            answer.ended = lambda report, said: self._keep(key, [*messages, *said], report)
        wanted = Wanted.by(body, request, [(chat.tokens, chat.params)], chat.form)
        return await self._exchange.run(request, key, wanted, answer)

    def find(self, key: Key, name: str) -> dict[str, Any]:
        """A response that was made for this key. Raises ApiError 404."""
        return self._of(key, name).report

    def forget(self, key: Key, name: str) -> dict[str, Any]:
        """Delete one. Raises ApiError 404."""
        self._bytes -= self._of(key, name).size
        del self._kept[name]
        return {"id": name, "object": "response", "deleted": True}

    def _of(self, key: Key, name: str) -> _Kept:
        found = self._kept.get(name)
        if found is None or found.owner != key.name:
            raise ApiError(404, f"there is no response {name[:100]!r} (any more)", param="previous_response_id")
        return found

    def _before(self, key: Key, name: str | None) -> list[dict[str, Any]]:
        return list(self._of(key, name).messages) if name else []

    def _keep(self, key: Key, messages: list[dict[str, Any]], report: dict[str, Any]) -> None:
        size = len(msgspec.json.encode([messages, report]))
        self._kept[report["id"]] = _Kept(key.name, messages, report, size)
        self._bytes += size
        while len(self._kept) > KEPT or self._bytes > KEPT_BYTES:
            self._bytes -= self._kept.popitem(last=False)[1].size


def messages_of(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Input items as messages of a chat. Raises ApiError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        where = f"input[{index}]"
        match item.get("type", "message"):
            case "message":
                messages.append({"role": item.get("role"), "content": _text(item.get("content"), where)})
            case "function_call":
                function = {"name": item.get("name"), "arguments": _word(item, "arguments", where) or "{}"}
                call = {"id": _word(item, "call_id", where), "type": "function", "function": function}
                if not messages or "tool_calls" not in messages[-1]:
                    messages.append({"role": "assistant", "content": "", "tool_calls": []})
                messages[-1]["tool_calls"].append(call)
            case "function_call_output":
                said = _text(item.get("output"), where)
                messages.append({"role": "tool", "tool_call_id": _word(item, "call_id", where), "content": said})
            case "reasoning":
                continue  # thoughts of earlier turns are not said again
            case other:
                raise bad_request(f"{where}: items of type {str(other)[:40]!r} are not supported", where)
    return messages


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") in TEXTS for p in content):
        texts = [part.get("refusal" if part["type"] == "refusal" else "text") for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise bad_request(f"{where}: content is a text, or parts of text", where)


def _word(item: Mapping[str, Any], name: str, where: str) -> str:
    """A field that may be missing. Raises ApiError for one that is no text."""
    value = item.get(name)
    if value is not None and not isinstance(value, str):
        raise bad_request(f"{where}.{name} is a text", f"{where}.{name}")
    return value or ""


def _as_chat(body: ResponsesRequest, messages: list[dict[str, Any]]) -> openai.ChatRequest:
    if body.instructions:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    common = {name: getattr(body, name) for name in openai.Common.__struct_fields__}
    common["max_tokens"] = body.max_tokens if body.max_output_tokens is None else body.max_output_tokens
    form = (body.text or {}).get("format")
    if not isinstance(form, dict | None):
        raise bad_request("text.format is an object", "text.format")
    common["response_format"] = body.response_format if form is None else form
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise bad_request("reasoning.effort is a word", "reasoning")
    return openai.ChatRequest(
        **common, messages=messages, tools=body.tools, tool_choice=body.tool_choice, reasoning_effort=effort,
        parallel_tool_calls=body.parallel_tool_calls, chat_template_kwargs=body.chat_template_kwargs,
    )  # fmt: skip


def _echoed(body: ResponsesRequest) -> dict[str, Any]:
    """What a response says of its request."""
    return {
        "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id, "reasoning": body.reasoning or {"effort": None},
        "store": body.store is not False, "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": body.text or {"format": {"type": "text"}}, "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [], "top_p": 1.0 if body.top_p is None else body.top_p, "truncation": "disabled",
        "metadata": body.metadata or {}, "user": body.user,
    }  # fmt: skip


@dataclass
class ResponsesAnswer(Answer):
    """A response."""

    prompt_field = "input"
    asked: Mapping[str, Any] = field(default_factory=dict)
    ended: Callable[[dict[str, Any], list[dict[str, Any]]], None] | None = None
    """Told the response, and what it adds to the conversation, when it is whole."""
    parts: Parts = field(default_factory=Parts)
    _names: list[str] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    def add(self, chunk: Chunk) -> None:
        """Collect a chunk."""
        choice = self.choices[chunk.choice]
        self.parts.add(choice.take(chunk), [call.id for call in choice.calls])

    def report(self, ended: list[RequestTimings]) -> dict[str, Any]:
        """The whole response."""
        usage, short = self.usage(ended), self.choices[0].reason == "length"
        report = self._head("incomplete" if short else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if short else None,
            "output": [self._item(index, "completed") for index in range(len(self.parts))],
            "usage": {
                "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
                "output_tokens_details": {
                    "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
                },
                "total_tokens": usage["total_tokens"],
            },
        }  # fmt: skip
        if self.ended is not None:
            self.ended(report, self._said())
        return report

    def _said(self) -> list[dict[str, Any]]:
        """The answer as a chat's message."""
        choice = self.choices[0]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(choice.text)}
        if choice.calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": "".join(c.arguments)}}
                for c in choice.calls
            ]
        return [message]

    def _head(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "error": None,
            "incomplete_details": None, "model": self.model, "output": [], "usage": None, **self.asked,
        }  # fmt: skip

    def _name(self, index: int) -> str:
        """An item's id, the same whenever it is asked for."""
        while len(self._names) <= index:
            prefix = {"text": "msg", "thought": "rs", "call": "fc"}[self.parts[len(self._names)].kind]
            self._names.append(f"{prefix}_{self.id.removeprefix('resp_')[:24]}{len(self._names)}")
        return self._names[index]

    def _item(self, index: int, status: str) -> dict[str, Any]:
        part, head = self.parts[index], {"id": self._name(index), "status": status}
        empty = status == "in_progress"
        match part.kind:
            case "text":
                content = [] if empty else [_content(part)]
                return head | {"type": "message", "role": "assistant", "content": content}
            case "thought":
                return head | {"type": "reasoning", "summary": [], "content": [] if empty else [_content(part)]}
            case _:
                arguments = "" if empty else part.text
                return head | {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": arguments}

    def opening(self) -> list[bytes]:
        """The response without output."""
        head = self._head("in_progress")
        return [self._event("response.created", response=head), self._event("response.in_progress", response=head)]

    def frames(self, chunk: Chunk) -> list[bytes]:
        """What a chunk brings, item by item."""
        choice = self.choices[chunk.choice]
        frames: list[bytes] = []
        events = choice.take(chunk)
        for event in events:  # one by one: an item ends when the next one begins
            for index, begun, text in self.parts.add([event], [call.id for call in choice.calls]):
                if begun:
                    frames += self._closed(index - 1) + self._begun(index)
                if text:
                    frames.append(self._grown(index, text))
        return frames

    def _begun(self, index: int) -> list[bytes]:
        part = self.parts[index]
        bare = Part(part.kind, part.name, part.id)
        frames = [
            self._event("response.output_item.added", output_index=index, item=self._item(index, "in_progress"))
        ]  # fmt: skip
        if part.kind != "call":
            frames.append(self._event("response.content_part.added", **self._place(index), part=_content(bare)))
        return frames

    def _grown(self, index: int, text: str) -> bytes:
        match self.parts[index].kind:
            case "text":
                return self._event("response.output_text.delta", **self._place(index), delta=text, logprobs=[])
            case "thought":
                return self._event("response.reasoning_text.delta", **self._place(index), delta=text)
            case _:
                name, item = "response.function_call_arguments.delta", self._name(index)
                return self._event(name, item_id=item, output_index=index, delta=text)

    def _closed(self, index: int) -> list[bytes]:
        if index < 0:
            return []
        part, frames = self.parts[index], []
        match part.kind:
            case "text":
                done = self._event("response.output_text.done", **self._place(index), text=part.text, logprobs=[])
                frames = [done, self._event("response.content_part.done", **self._place(index), part=_content(part))]
            case "thought":
                done = self._event("response.reasoning_text.done", **self._place(index), text=part.text)
                frames = [done, self._event("response.content_part.done", **self._place(index), part=_content(part))]
            case _:
                item = self._name(index)
                frames = [
                    self._event(
                        "response.function_call_arguments.done", item_id=item, output_index=index, name=part.name,
                        arguments=part.text,
                    )
                ]  # fmt: skip
        item_done = self._event("response.output_item.done", output_index=index, item=self._item(index, "completed"))
        return [*frames, item_done]

    def closing(self, ended: list[RequestTimings], *, usage: bool, timed: bool) -> list[bytes]:
        """The whole response."""
        closed = self._closed(len(self.parts) - 1)
        report = self.report(ended)
        report |= timings_of(ended, timed=timed)
        return [*closed, self._event(f"response.{report['status']}", response=report)]

    def failure(self, error: ApiError) -> bytes:
        """A problem in the middle of a stream."""
        problem = {"code": error.code or error.kind, "message": error.message}
        return self._event("response.failed", response=self._head("failed") | {"error": problem})

    def _place(self, index: int) -> dict[str, Any]:
        return {"item_id": self._name(index), "output_index": index, "content_index": 0}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        return frame({"type": name, "sequence_number": next(self._numbers), **fields}, name)


def _content(part: Part) -> dict[str, Any]:
    if part.kind == "thought":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
