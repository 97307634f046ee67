"""Chats: a conversation with its tools becomes a prompt, settings, and a way to read the answer."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slipstream.program.sampling import SamplingParams
from slipstream.serving import openai
from slipstream.serving.errors import bad_request
from slipstream.serving.prompts import Prompts
from slipstream.serving.tools import Reading, Toolbox, toolbox_of
from slipstream.text.parsers import REASONING, TOOLS, reasoning_of, tool_format_of


@dataclass(frozen=True, slots=True)
class Chat:
    """A request that can be given to the engine."""

    tokens: list[int]
    params: SamplingParams
    reading: Reading
    form: str = ""
    """The field that says what form the answer must have."""


class Names(NamedTuple):
    """What a protocol calls the fields that say what form an answer must have."""

    form: str = "response_format"
    parameters: str = "function.parameters"
    """Those of a tool, within it."""


CHAT = Names()


class Chats:
    """Prepares them for one model."""

    def __init__(self, prompts: Prompts, tool_format: str | None = None, reasoning: str | None = None):
        """The formats are what the chat template says unless they are named; "none": no thoughts are looked for."""
        source = prompts.template.source if prompts.template is not None else None
        self.prompts = prompts
        self._format = TOOLS[tool_format] if tool_format else tool_format_of(source)
        self._reasoning = None if reasoning == "none" else reasoning or reasoning_of(source)
        self._knows_tools = "tools" in (source or "")

    async def prepare(self, body: openai.ChatRequest, names: Names = CHAT) -> Chat:
        """Raises ApiError for what cannot be, by the `names` that its client knows."""
        messages, switches = openai.messages(body), openai.template_switches(body)
        box = toolbox_of(body.tools, body.tool_choice, body.parallel_tool_calls, self._format)
        grammar, field = await self.prompts.off_loop(lambda: body.form(names.form))
        # What is held to a form from its first character on has no room for a thought.
        reasoning = None if grammar or (box is not None and box.must) else self._reasoning
        special = self.prompts.tokenizer.special
        shown = tuple(special[mark] for mark in REASONING.get(reasoning or "", ()) if mark in special)
        if box is not None:
            called = await self.prompts.off_loop(functools.partial(box.grammar, self.prompts.tokenizer, shown))
            if called and grammar:
                raise bad_request(f"tool calls and {field} cannot both be kept to", field)
            if called:
                grammar, field = called, box.held_by(names.parameters)
            shown += box.shown(self.prompts.tokenizer)
            if self._knows_tools:
                switches["tools"] = box.described()
            else:
                messages = _taught(messages, box)
        tokens = await self.prompts.of_chat(messages, **switches)
        opened = reasoning is not None and self.prompts.thinks(tokens, reasoning)
        if body.max_tokens is None:
            body.max_tokens = body.max_completion_tokens
        params = openai.sampling(body, openai.chat_logprobs(body), grammar, shown)
        return Chat(tokens, params, Reading(box, reasoning, opened), field)


def _taught(messages: Sequence[Mapping[str, Any]], box: Toolbox) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: they are told of in the system message, and calls and their
    results are texts.
    """
    told = [_plain(message) for message in messages]
    if told and told[0]["role"] == "system":
        told[0] = {**told[0], "content": f"{told[0]['content']}\n\n{box.taught()}"}
        return told
    return [{"role": "system", "content": box.taught()}, *told]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message["role"], message["content"]
    if role == "tool":
        return {"role": "user", "content": f"Result of the tool: {content}"}
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message.get("tool_calls") or ()
    ]
    if calls:
        written = openai.written(calls)
        return {"role": role, "content": f"{content}\n{written}" if content else written}
    return {"role": role, "content": content}
