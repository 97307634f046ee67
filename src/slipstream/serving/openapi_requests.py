"""What requests look like, for the OpenAPI document: what the types that they are read into leave open.

Those let more through, so that errors can say more. Which values go together no schema here says.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.program.sampling import MAX_CHOICES, MAX_STOPS
from slipstream.serving.embeddings import ENCODINGS, MOST_INPUTS
from slipstream.serving.keys import MOST_PRIORITY
from slipstream.serving.messages import THINKING
from slipstream.serving.openai import (
    LONGEST_SWITCH,
    LONGEST_TAG,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MOST_TOKEN,
    ROLE,
    TEMPLATE_SWITCHES,
)
from slipstream.serving.openapi_shapes import (
    FLAG,
    OPEN,
    TEXT,
    Schema,
    any_of,
    closed_object,
    list_of,
    number,
    one_of,
    open_object,
    or_null,
    ref,
    whole,
    words,
)
from slipstream.serving.tools import MOST_TOOLS, NAME
from slipstream.text.grammars import MOST_CHARACTERS, MOST_REGEX

Fields = dict[str, Schema]

_MOST = 1 << 30
_NOTHING: Schema = {"type": "null"}
_NAME: Schema = {"type": "string", "pattern": f"^{NAME.pattern}$"}
_REGEX = words(1, MOST_REGEX)
_LARK = words(1, MOST_CHARACTERS) | {"examples": ['start: "yes" | "no"']}
_CHOICE = list_of(words(), 1)


def _typed(name: str, fields: Fields, optional: Fields | None = None) -> Schema:
    """An object that says what it is."""
    return open_object({"type": one_of(name), **fields}, optional)


_TEXT_PART = _typed("text", {"text": TEXT})
_BLOCKS = any_of(TEXT, list_of(_TEXT_PART))
_CALLED = open_object({"name": TEXT}, {"arguments": or_null(any_of(TEXT, OPEN))})
_FUNCTION = {"description": or_null(TEXT), "parameters": or_null(ref("JSONSchema")), "strict": or_null(FLAG)}
_ITEM_TEXT = any_of(
    *(_typed(kind, {"text": TEXT}) for kind in ("input_text", "output_text", "text")),
    _typed("refusal", {"refusal": TEXT}),
)
_ITEM_CONTENT = any_of(TEXT, list_of(_ITEM_TEXT))
_FORMAT = any_of(_typed("text", {}), _typed("json_object", {}), _typed("json_schema", {"schema": ref("JSONSchema")}))
_SWITCHES: Schema = {
    "type": "object", "additionalProperties": False,
    "properties": {name: any_of(FLAG, {"type": "integer"}, words(0, LONGEST_SWITCH)) for name in TEMPLATE_SWITCHES},
}  # fmt: skip

SHAPES: Fields = {
    "JSONSchema": OPEN | {
        "description": "JSON Schema. What of it is kept to is in docs/api.md.",
        "examples": [{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}],
    },
    "ResponseFormat": any_of(
        _typed("text", {}), _typed("json_object", {}),
        _typed("json_schema", {"json_schema": open_object({"schema": ref("JSONSchema")})}),
    ),
    "StructuredOutputs": closed_object({}, {
        "json": or_null(ref("JSONSchema")), "regex": or_null(_REGEX), "choice": or_null(_CHOICE),
        "grammar": or_null(_LARK), "json_object": or_null(FLAG),
    }),
    "ChatMessage": open_object(
        {"role": {"type": "string", "pattern": f"^{ROLE.pattern}$"}},
        {"content": or_null(_BLOCKS), "tool_calls": or_null(list_of(ref("ToolCall")))},
    ),
    "ToolCall": open_object({"function": _CALLED}),
    "Tool": open_object({"function": open_object({"name": _NAME}, _FUNCTION)}, {"type": one_of("function")}),
    "ToolChoice": any_of(
        one_of("none", "auto", "required"), _typed("function", {"function": open_object({"name": _NAME})})
    ),
    "ResponseItem": any_of(
        open_object({"role": {"type": "string", "pattern": f"^{ROLE.pattern}$"}, "content": _ITEM_CONTENT},
                    {"type": one_of("message")}),
        _typed("function_call", {"name": TEXT}, {"call_id": or_null(TEXT), "arguments": or_null(TEXT)}),
        _typed("function_call_output", {"output": _ITEM_CONTENT}, {"call_id": or_null(TEXT)}),
        _typed("reasoning", {}),
    ),
    "ResponseTool": open_object({"name": _NAME}, {"type": one_of("function"), **_FUNCTION}),
    "ResponseToolChoice": any_of(one_of("none", "auto", "required"), _typed("function", {"name": _NAME})),
    "MessageBlock": any_of(
        _TEXT_PART, _typed("tool_use", {"id": TEXT, "name": TEXT, "input": OPEN}),
        _typed("tool_result", {"tool_use_id": TEXT}, {"content": or_null(_BLOCKS)}),
        _typed("thinking", {}), _typed("redacted_thinking", {}),
    ),
    "InputMessage": open_object(
        {"role": one_of("user", "assistant", "system"), "content": any_of(TEXT, list_of(ref("MessageBlock")))}
    ),
    "MessageTool": open_object(
        {"name": _NAME, "input_schema": ref("JSONSchema")},
        {"type": one_of("custom"), "description": TEXT, "strict": FLAG},
    ),
    "MessageToolChoice": any_of(
        *(_typed(kind, {}, {"disable_parallel_tool_use": FLAG}) for kind in ("auto", "any", "none")),
        _typed("tool", {"name": _NAME}, {"disable_parallel_tool_use": FLAG}),
    ),
}  # fmt: skip
"""Schemas by name, beside those of the types themselves."""

_SAMPLING: Fields = {
    "temperature": number(0, 100), "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": whole(0, _MOST),
}  # fmt: skip
_COMMON: Fields = _SAMPLING | {
    "max_tokens": whole(1, _MOST), "min_p": number(0, 1), "n": whole(1, MAX_CHOICES),
    "stop": any_of(TEXT, list_of(TEXT, 0, MAX_STOPS)), "seed": {"type": "integer"},
    "logit_bias": {
        "type": "object", "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": number(-100, 100),
    },
    "presence_penalty": number(-2, 2), "frequency_penalty": number(-2, 2), "repetition_penalty": number(0.01, 100),
    "min_tokens": whole(0, _MOST), "priority": whole(0, MOST_PRIORITY),
    "metadata": {
        "type": "object", "properties": {"tag": words(0, LONGEST_TAG)}, "additionalProperties": {"type": "string"}
    },
    "response_format": ref("ResponseFormat"), "structured_outputs": ref("StructuredOutputs"),
    "guided_json": ref("JSONSchema"), "guided_regex": _REGEX, "guided_choice": _CHOICE, "guided_grammar": _LARK,
}  # fmt: skip
NEEDED: Mapping[str, str] = {
    "ChatRequest": "messages", "CompletionRequest": "prompt", "MessagesRequest": "messages",
    "EmbeddingsRequest": "input", "ResponsesRequest": "input",
}  # fmt: skip
"""What each body cannot do without, though its type may."""


SHOWN = ("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort")
"""The fields of a chat that say what its prompt is."""


def tokens_of(vocabulary: int | None) -> Schema:
    """A list of token ids."""
    return list_of(whole(0, MOST_TOKEN if vocabulary is None else vocabulary - 1), 1)


def fields(served_name: str | None, vocabulary: int | None) -> Mapping[str, Fields]:
    """The fields of each type of request that are to be said more exactly; all but the needed ones may be null."""
    tokens = tokens_of(vocabulary)
    model: Schema = TEXT if served_name is None else one_of(served_name, "")

    def prompts(most: int) -> Schema:
        return any_of(words(), list_of(words(), 1, most), tokens, list_of(tokens, 1, most))

    common = _COMMON | {"model": model, "stop_token_ids": list_of(tokens["items"])}
    return {
        "ChatRequest": common | {
            "messages": list_of(ref("ChatMessage"), 1, MAX_MESSAGES), "max_completion_tokens": whole(1, _MOST),
            "top_logprobs": whole(0, 20), "tools": list_of(ref("Tool"), 0, MOST_TOOLS),
            "tool_choice": ref("ToolChoice"), "chat_template_kwargs": _SWITCHES,
        },
        "CompletionRequest": common | {
            "prompt": prompts(MAX_PROMPTS), "logprobs": whole(0, 20), "max_tokens": whole(0, _MOST)
        },
        "ResponsesRequest": common | {
            "input": any_of(TEXT, list_of(ref("ResponseItem"), 1)), "n": {"const": 1},
            "max_output_tokens": whole(1, _MOST), "tools": list_of(ref("ResponseTool"), 0, MOST_TOOLS),
            "tool_choice": ref("ResponseToolChoice"), "text": open_object({}, {"format": or_null(_FORMAT)}),
            "reasoning": open_object({}, {"effort": or_null(TEXT)}), "truncation": one_of("disabled"),
            "background": {"const": False}, "chat_template_kwargs": _SWITCHES,
        },
        "MessagesRequest": _SAMPLING | {
            "model": model, "messages": list_of(ref("InputMessage"), 1, MAX_MESSAGES), "max_tokens": whole(1, _MOST),
            "system": _BLOCKS, "stop_sequences": list_of(TEXT, 0, MAX_STOPS),
            "seed": _COMMON["seed"], "tools": list_of(ref("MessageTool"), 0, MOST_TOOLS),
            "tool_choice": ref("MessageToolChoice"), "thinking": open_object({"type": one_of(*THINKING)}),
            "output_config": open_object({}, {"format": or_null(_typed("json_schema", {"schema": ref("JSONSchema")}))}),
            "output_format": _typed("json_schema", {"schema": ref("JSONSchema")}),
        },
        "EmbeddingsRequest": {
            "model": model, "input": prompts(MOST_INPUTS), "encoding_format": one_of(*ENCODINGS),
            "dimensions": _NOTHING, "pooling": one_of("mean", "last"),
        },
    }  # fmt: skip
