"""Thoughts in every protocol: apart from what is said, streamed as whole, whatever their marks are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import tokenizers

from slipstream.engine.messages import RequestTimings
from slipstream.engine.output import Chunk
from slipstream.program.sampling import SamplingParams
from slipstream.serving.app import Api
from slipstream.serving.exchange import ServerLimits
from slipstream.serving.keys import Keys
from slipstream.text import Tokenizer
from slipstream.text.parsers import REASONING
from slipstream.text.template import ChatTemplate
from slipstream.text.tokenizer import byte_alphabet

TIME: Any = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
CALL = '<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call>'


class Setting(NamedTuple):
    """How a model thinks: the marks, whether they are special tokens, and whether the prompt begins the thought."""

    reasoning: str
    special: bool
    opened: bool

    @property
    def marks(self) -> tuple[str, str]:
        return REASONING[self.reasoning]

    def written(self, thought: str, rest: str) -> str:
        """What the model writes."""
        begin, end = self.marks
        return f"{'' if self.opened else begin}\n{thought}\n{end}\n\n{rest}"


SETTINGS = [
    Setting(name, special, opened) for name in REASONING for special in (False, True) for opened in (False, True)
]
settings = pytest.mark.parametrize("setting", SETTINGS)
Found = tuple[str, str, list[tuple[str, Any]], Any]
"""Thought, text, calls, and the reason for the end."""


def tokenizer_of(setting: Setting) -> Tokenizer:
    """Bytes, and the marks if they are special."""
    alphabet = byte_alphabet()
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(dict(alphabet), []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    special = {"<|im_end|>": 256} | (
        {name: 257 + at for at, name in enumerate(setting.marks)} if setting.special else {}
    )
    inner.add_special_tokens(list(special))
    return Tokenizer(inner, [*(bytes([n]) for n in range(256)), b"", b"", b""], special, eos=frozenset({256}))


class Client:
    """Stands for an engine: says a text token by token, special ones only where they are to be shown."""

    ready, healthy, open, stats, restarts = True, True, 0, None, 0

    def __init__(self, tokenizer: Tokenizer, text: str):
        self.info = SimpleNamespace(max_len=2000, vocabulary=300)
        self.tokenizer, self.says = tokenizer, tokenizer.encode(text, special=True)
        self.asked: list[SamplingParams] = []

    async def generate(self, tokens: list[int], params: SamplingParams, terms: Any) -> AsyncIterator[Any]:
        self.asked.append(params)
        detokenizer = self.tokenizer.detokenizer(params.shown)
        for token in self.says:
            yield [Chunk(0, 0, detokenizer.add(token), (token,))], None
        timings = RequestTimings(len(tokens), 0, len(self.says) + 1, 0.0, 0.0, 0.0, 0, 0.0)
        yield [Chunk(0, 0, detokenizer.finish(), (256,), finish_reason="stop")], timings


def served(setting: Setting, text: str, reasoning: str | None = None) -> tuple[Client, httpx.AsyncClient]:
    """A server whose model says a text; its chat template has the marks."""
    tokenizer = tokenizer_of(setting)
    client = Client(tokenizer, text)
    opening = setting.marks[0] + "\\n" if setting.opened else ""
    template = ChatTemplate(
        "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}{{ tools }}{# <tool_call> "
        + setting.marks[1] + " #}{{ '" + opening + "' }}"
    )  # fmt: skip
    api = Api(client, tokenizer, template, "m", Keys([]), ServerLimits(), formats=(None, reasoning))  # type: ignore[arg-type]
    return client, httpx.AsyncClient(transport=httpx.ASGITransport(api.app()), base_url="http://test")


async def chat(http: httpx.AsyncClient, tools: str, stream: bool, **more: Any) -> Found:
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=http)
    tool = {"type": "function", "function": {"name": "time", "parameters": TIME}}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "?"}],
        **({"tools": [tool]} if tools else {}),
        **more,
    }
    if not stream:
        done = await client.chat.completions.create(**body)
        assert done.usage.completion_tokens_details.reasoning_tokens <= done.usage.completion_tokens
        (choice,) = done.choices
        message = choice.message.model_dump()
        assert message.get("reasoning") == message.get("reasoning_content")
        calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"] or ()]
        return message.get("reasoning_content", ""), message["content"] or "", calls, choice.finish_reason
    thought = text = ""
    pieces: dict[int, list[str]] = {}
    reason = None
    async for event in await client.chat.completions.create(**body, stream=True):
        for choice in event.choices:
            delta = choice.delta.model_dump()
            assert not text or not delta.get("reasoning_content"), "thoughts come first"
            thought, text = thought + delta.get("reasoning_content", ""), text + (delta["content"] or "")
            for piece in delta["tool_calls"] or ():
                name, arguments = pieces.setdefault(piece["index"], ["", ""])
                function = piece["function"]
                pieces[piece["index"]] = [name + (function["name"] or ""), arguments + function["arguments"]]
            reason = choice.finish_reason or reason
    return thought, text, [(name, json.loads(arguments)) for name, arguments in pieces.values()], reason


async def responses(http: httpx.AsyncClient, tools: str, stream: bool, **more: Any) -> Found:
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=http)
    tool = {"type": "function", "name": "time", "parameters": TIME, "strict": tools == "strict"}
    body = {"model": "m", "input": "?", **({"tools": [tool]} if tools else {}), **more}
    if not stream:
        return output_of(await client.responses.create(**body))
    events = [event async for event in await client.responses.create(**body, stream=True)]
    final = events[-1].response
    deltas = {kind: "".join(e.delta for e in events if e.type == f"response.{kind}.delta")
              for kind in ("reasoning_text", "output_text", "function_call_arguments")}  # fmt: skip
    found = output_of(final)
    assert (deltas["reasoning_text"], deltas["output_text"]) == found[:2]
    assert deltas["function_call_arguments"] == "".join(i.arguments for i in final.output if i.type == "function_call")
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in final.output]
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    assert added == [item.id for item in done]
    return found


def output_of(response: Any) -> Found:
    kinds = [item.type for item in response.output]
    assert kinds == sorted(kinds, key=["reasoning", "message", "function_call"].index)
    assert kinds.count("reasoning") < 2
    thought = "".join(part.text for item in response.output if item.type == "reasoning" for part in item.content)
    calls = [(i.name, json.loads(i.arguments)) for i in response.output if i.type == "function_call"]
    return thought, response.output_text, calls, response.status


async def messages(http: httpx.AsyncClient, tools: str, stream: bool, **more: Any) -> Found:
    tool = {"name": "time", "input_schema": TIME, "strict": tools == "strict"}
    body = {"model": "m", "max_tokens": 900, "messages": [{"role": "user", "content": "?"}], "stream": stream,
            **({"tools": [tool]} if tools else {}), **more}  # fmt: skip
    answer = await http.post("/v1/messages", json=body)
    message = streamed_message(answer.text) if stream else answer.json()
    blocks = message["content"]
    kinds = [block["type"] for block in blocks]
    assert kinds == sorted(kinds, key=["thinking", "text", "tool_use"].index)
    assert len(kinds) == len(set(kinds))
    thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    return thought, text, calls, message["stop_reason"]


def streamed_message(text: str) -> dict[str, Any]:
    """A message that came in events, put together: every block is begun, grows, and ends before the next one."""
    message: dict[str, Any] = {}
    open_block: int | None = None
    for line in text.splitlines():
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {"type": ""}
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert (open_block, event["index"]) == (None, len(message["content"]))
                open_block = event["index"]
                message["content"].append(event["content_block"] | {"pieces": ""})
            case "content_block_delta":
                assert event["index"] == open_block
                (piece,) = (value for name, value in event["delta"].items() if name != "type")
                kind = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
                assert event["delta"]["type"] == kind[message["content"][-1]["type"]]
                message["content"][-1]["pieces"] += piece
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
            case "message_delta":
                assert open_block is None
                message |= event["delta"]
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["pieces"])
        else:
            block[block["type"]] += block["pieces"]
    return message


Protocol = Callable[..., Awaitable[Found]]
PROTOCOLS: dict[str, tuple[Protocol, str, str]] = {
    "chat": (chat, "stop", "tool_calls"), "responses": (responses, "completed", "completed"),
    "messages": (messages, "end_turn", "tool_use"),
}  # fmt: skip
"""How each is asked, and what it calls an end, and an end with calls."""
protocols = pytest.mark.parametrize("protocol", sorted(PROTOCOLS))


def asked(
    setting: Setting, text: str, protocol: str, /, *, tools: str = "", parser: str | None = None, **more: Any
) -> Found:
    """What comes of a text in a protocol; streamed it is the same."""

    async def run() -> Found:
        found = []
        for stream in (False, True):
            _, http = served(setting, text, parser)
            async with http:
                found.append(await PROTOCOLS[protocol][0](http, tools, stream, **more))
        assert found[0] == found[1]
        return found[0]

    return asyncio.run(run())


@protocols
@settings
@pytest.mark.features("thoughts", "streaming")
def test_thoughts_are_apart_from_what_is_said(setting: Setting, protocol: str) -> None:
    _, ended, called = PROTOCOLS[protocol]
    text = setting.written("Hm, é.", "Yes.")
    assert asked(setting, text, protocol) == ("Hm, é.", "Yes.", [], ended)
    text = setting.written("Hm.", f"I look.\n{CALL}")
    assert asked(setting, text, protocol, tools="loose") == ("Hm.", "I look.", [("time", {"zone": "UTC"})], called)
    text = setting.written(f"I call {CALL}.", CALL)
    assert asked(setting, text, protocol, tools="loose") == (f"I call {CALL}.", "", [("time", {"zone": "UTC"})], called)


@protocols
@settings
def test_who_never_ends_a_thought_says_nothing(setting: Setting, protocol: str) -> None:
    text = setting.written("Hm. And", "").partition(setting.marks[1])[0]
    assert asked(setting, text, protocol)[:3] == ("Hm. And", "", [])


@protocols
def test_who_does_not_think_says_all(protocol: str) -> None:
    for setting in SETTINGS:
        if not setting.opened:
            assert asked(setting, "Yes.\n", protocol)[:3] == ("", "Yes.\n", [])


def test_nobody_looks_for_thoughts_where_none_are_wanted() -> None:
    setting = Setting("think", False, False)
    assert asked(setting, "<think>Hm.</think>Yes.", "chat", parser="none")[:2] == (
        "", "<think>Hm.</think>Yes.",
    )  # fmt: skip


def test_tokens_of_thoughts_are_counted() -> None:
    async def run() -> int:
        _, http = served(Setting("think", True, False), "<think>abc</think>Yes.")
        async with http:
            body = {"messages": [{"role": "user", "content": "?"}]}
            usage = (await http.post("/v1/chat/completions", json=body)).json()["usage"]
        return int(usage["completion_tokens_details"]["reasoning_tokens"])

    assert asyncio.run(run()) == 4, "the letters and the mark of the end; nothing is known to be a thought before"


JSON_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": TIME}}


@settings
@pytest.mark.features("thoughts", "grammar")
def test_what_is_held_to_a_form_is_no_thought(setting: Setting) -> None:
    """Even where the prompt has begun one: an answer that can be nothing but JSON never ends it."""
    said = '{"zone": "UTC"}'
    assert asked(setting, said, "chat", response_format=JSON_FORMAT)[:3] == ("", said, [])
    found = asked(setting, said, "responses", text={"format": {"type": "json_schema", **JSON_FORMAT["json_schema"]}})
    assert found[:3] == ("", said, [])
    named: Any = {"type": "function", "function": {"name": "time"}}
    for choice in ("required", named):
        found = asked(setting, CALL, "chat", tools="loose", tool_choice=choice)
        assert found == ("", "", [("time", {"zone": "UTC"})], "tool_calls")
    assert asked(setting, CALL, "messages", tools="loose", tool_choice={"type": "any"})[2] == [
        ("time", {"zone": "UTC"})
    ]


@protocols
@settings
@pytest.mark.features("thoughts", "tools", "grammar", "streaming")
def test_strict_tools_leave_room_for_thoughts(setting: Setting, protocol: str) -> None:
    """The model may think before it calls, and its marks are seen."""
    text = setting.written("Hm.", f"I look.\n{CALL}")
    found = asked(setting, text, protocol, tools="strict")
    assert found == ("Hm.", "I look.", [("time", {"zone": "UTC"})], PROTOCOLS[protocol][2])
