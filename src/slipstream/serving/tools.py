"""Tools: what a request's tools mean for the prompt, for reading the answer, and for what the model may say."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import UsageError
from slipstream.serving.errors import bad_request
from slipstream.text import Tokenizer
from slipstream.text.grammars import bounded, of_parts, of_parts_in_text
from slipstream.text.parsers import OutputParser, ToolFormat

MOST_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
TAUGHT = """You can call tools. To call some, answer with nothing but a JSON list of calls, such as \
[{"name": "tool", "arguments": {"argument": 1}}]. These are the tools:
"""
"""What a model is told whose chat template knows no tools."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model can call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False

    def described(self) -> dict[str, Any]:
        """As chat templates want it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a request. Whether one `must` be called, and if so, whether it is the `only` one that may be."""

    format: ToolFormat
    tools: tuple[Tool, ...]
    must: bool = False
    only: str | None = None
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Of all tools."""
        return frozenset(tool.name for tool in self.tools)

    def grammar(self, tokenizer: Tokenizer, thoughts: Sequence[int] = ()) -> str:
        """What the model may say; empty: anything. `thoughts` are special tokens around thoughts, where there is room.

        Raises ApiError for parameters that are no schema we can keep to.
        """
        special = {name: tokenizer.special[name] for name in self.format.shown if name in tokenizer.special}
        wanted = [tool for tool in self.tools if self.only in (None, tool.name)]
        form = self.format
        try:
            if self.must:
                several = self.parallel and self.only is None
                parts = [form.part(tool.name, tool.parameters) for tool in wanted]
                return of_parts(parts, form.begin, form.between, form.end, special, several=several)
            if form.trigger and any(tool.strict for tool in wanted):
                anything: Mapping[str, Any] = {"type": "object"}
                parts = [form.part(tool.name, tool.parameters if tool.strict else anything) for tool in wanted]
                return of_parts_in_text(parts, form.trigger, special, form.begin, form.between, form.end, thoughts)
        except UsageError as error:
            raise bad_request(f"tools: {error}", "tools") from error
        return ""

    def held_by(self, parameters: str) -> str:
        """The field that a grammar comes from: the `parameters` of one tool, or the tools."""
        held = [n for n, tool in enumerate(self.tools) if (self.must or tool.strict) and self.only in (None, tool.name)]
        return f"tools[{held[0]}].{parameters}" if len(held) == 1 else "tools"

    def shown(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Special tokens that calls are found by."""
        return tuple(tokenizer.special[name] for name in self.format.shown if name in tokenizer.special)

    def described(self) -> list[dict[str, Any]]:
        """As chat templates want them."""
        return [tool.described() for tool in self.tools]

    def taught(self) -> str:
        """For a model whose template knows no tools."""
        return TAUGHT + "\n".join(json.dumps(tool.described()["function"]) for tool in self.tools)

    def call_id(self, given: str = "") -> str:
        """A name for a call."""
        length = self.format.id_length
        if given:
            return given
        return secrets.token_hex(5)[:length] if length < 12 else f"call_{secrets.token_hex(12)}"


def toolbox_of(tools: Sequence[Any] | None, choice: Any, parallel: bool | None, form: ToolFormat) -> Toolbox | None:
    """The tools of an OpenAI request, checked; None if there are none, or none may be called. Raises ApiError."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return None
    if len(tools) > MOST_TOOLS:
        raise bad_request(f"tools has {len(tools)} entries, at most {MOST_TOOLS} are taken", "tools")
    try:
        bounded(list(tools))  # of all together, before each is looked into
    except UsageError as error:
        raise bad_request(f"tools: {error}", "tools") from error
    found = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names = [tool.name for tool in found]
    if len(set(names)) < len(names):
        raise bad_request("two tools have the same name", "tools")
    if choice == "none":
        return None
    only = None if choice in (None, "auto", "required") else _chosen(choice, names)
    must = only is not None or choice == "required"
    return Toolbox(form, found, must, only, parallel is not False)


def _tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise bad_request(f"{where}: only tools of type function are supported", where)
    function = tool.get("function", tool)  # the responses API has its fields in the tool itself
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise bad_request(f"{where}: a name has letters, digits and any of _.:-, up to 128 of them", f"{where}.name")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise bad_request(f"{where}: parameters are a JSON schema", f"{where}.parameters")
    description, strict = function.get("description"), function.get("strict")
    if not isinstance(description, str | None):
        raise bad_request(f"{where}: a description is a text", f"{where}.description")
    if not isinstance(strict, bool | None):
        raise bad_request(f"{where}: strict is true or false", f"{where}.strict")
    return Tool(name, description or "", parameters, strict is True)


def _chosen(choice: Any, names: Sequence[str]) -> str:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if name in names:
            return str(name)
        raise bad_request("tool_choice names a tool that is not there", "tool_choice")
    raise bad_request('tool_choice is "none", "auto", "required", or names a function', "tool_choice")


@dataclass(frozen=True, slots=True)
class Reading:
    """How an answer's text is read: for calls, and for thoughts, which the prompt may have `opened`."""

    toolbox: Toolbox | None = None
    reasoning: str | None = None
    opened: bool = False

    @property
    def needed(self) -> bool:
        """Whether there is anything to be found."""
        return self.toolbox is not None or self.reasoning is not None

    def parser(self) -> OutputParser:
        """For one choice."""
        box = self.toolbox
        return OutputParser(
            box.format if box else None, box.names if box else None, self.reasoning, opened=self.opened
        )  # fmt: skip


NOTHING = Reading()
"""All text is said."""
