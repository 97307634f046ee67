"""Tools through OpenAI's client: called when they must be, streamed as whole, and their results said to the model."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import openai
import pytest

from slipstream.engine.output import Chunk
from slipstream.serving.answers import ChatAnswer
from slipstream.serving.errors import ApiError
from slipstream.serving.messages import MessagesAnswer
from slipstream.serving.responses import ResponsesAnswer
from slipstream.serving.tools import Reading, Tool, Toolbox, toolbox_of
from slipstream.text.parsers import REASONING, TOOLS
from tests.serving.conftest import KEY, Server
from tests.serving.test_thoughts import streamed_message

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather", "description": "The weather in a city.", "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"], "additionalProperties": False,
        },
    },
}  # fmt: skip
TIME = {"type": "function", "function": {"name": "time", "parameters": {
    "type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"],
    "additionalProperties": False}}}  # fmt: skip
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def client(real_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{real_server.url}/v1", api_key=KEY)


def test_a_tool_that_must_be_called_is(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        done = client.chat.completions.create(
            model="tiny", messages=ASK, tools=[WEATHER, TIME], tool_choice=choice, max_tokens=200, seed=1,
            parallel_tool_calls=False,
        )  # type: ignore[call-overload]  # fmt: skip
        (call,) = done.choices[0].message.tool_calls
        assert done.choices[0].finish_reason == "tool_calls"
        assert done.choices[0].message.content is None
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == ({"city", "days"} if call.function.name == "weather" else {"zone"})
        assert choice == "required" or call.function.name == "weather"
        assert call.id.startswith("call_")


@pytest.mark.features("tools", "grammar", "streaming")
def test_streamed_calls_are_the_whole_ones(client: openai.OpenAI) -> None:
    settings: Any = {
        "model": "tiny", "messages": ASK, "tools": [WEATHER, TIME], "tool_choice": "required", "max_tokens": 250,
        "seed": 4, "temperature": 0.9,
    }  # fmt: skip
    whole = client.chat.completions.create(**settings).choices[0]
    calls: dict[int, dict[str, str]] = {}
    reason = None
    for event in client.chat.completions.create(**settings, stream=True):
        for choice in event.choices:
            reason = choice.finish_reason or reason
            assert not choice.delta.content
            for piece in choice.delta.tool_calls or ():
                call = calls.setdefault(piece.index, {"name": "", "arguments": "", "id": ""})
                call["name"] += piece.function.name or ""
                call["arguments"] += piece.function.arguments or ""
                call["id"] += piece.id or ""
    assert reason == whole.finish_reason
    assert [(c["name"], c["arguments"]) for c in calls.values()] == [
        (c.function.name, c.function.arguments) for c in whole.message.tool_calls
    ]
    assert len({c["id"] for c in calls.values()}) == len(calls)


def test_results_are_said_to_the_model(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages: Any = [
        *ASK, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It rains."},
    ]  # fmt: skip
    with_result = client.chat.completions.create(
        model="tiny", messages=messages, tools=[WEATHER], max_tokens=8, temperature=0.0
    )
    assert with_result.usage.prompt_tokens > 100, "the tools are described, too"
    assert with_result.choices[0].finish_reason in ("stop", "length")
    none = client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER], tool_choice="none", max_tokens=2)  # type: ignore[call-overload]
    assert none.usage.prompt_tokens < 80, "a tool that may not be called is not spoken of"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]"), ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"), ({"tools": [TIME] * 200}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"), ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": [1]}}]}, "tools[0].parameters"),
        ({"tools": [TIME], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": [1]}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_what_is_refused_names_its_field(real_server: Server, body: Any, field: str) -> None:
    with real_server.client() as http:
        answer = http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 4, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


ARGUMENTS = ('{"city": "Pa\\"ris"}', '{"city": "[R}o<me"}')
FIRST, SECOND = (f'{{"name": "weather", "arguments": {arguments}}}' for arguments in ARGUMENTS)
WRITTEN = {
    "hermes": f"I look.\n<tool_call>\n{FIRST}\n</tool_call>\n<tool_call>\n{SECOND}\n</tool_call>",
    "llama3": f"{FIRST}; {SECOND}", "mistral": f"I look. [TOOL_CALLS][{FIRST}, {SECOND}]",
    "json": f"[{FIRST}, {SECOND}]",
}  # fmt: skip
Seen = tuple[str, str, list[str], str]
"""Thought, text, calls' arguments, why it ended."""


def by_chat(answer: ChatAnswer, frames: list[bytes]) -> tuple[Seen, Seen]:
    choice = answer.report([])["choices"][0]
    message, reasons = choice["message"], []
    joined, calls = {"content": "", "reasoning_content": ""}, dict[int, str]()
    for frame in frames[1:-1]:
        (piece,) = json.loads(frame.removeprefix(b"data: "))["choices"]
        for name in joined:
            joined[name] += piece["delta"].get(name, "")
        for call in piece["delta"].get("tool_calls", ()):
            calls[call["index"]] = calls.get(call["index"], "") + call["function"]["arguments"]
        reasons.append(piece["finish_reason"])
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    whole = [call["function"]["arguments"] for call in message["tool_calls"]]
    return (
        (message["reasoning_content"], message["content"] or "", whole, choice["finish_reason"]),
        (joined["reasoning_content"], joined["content"], list(calls.values()), reasons[-1]),
    )


def by_responses(answer: ResponsesAnswer, frames: list[bytes]) -> tuple[Seen, Seen]:
    events = [json.loads(frame.partition(b"data: ")[2]) for frame in frames]

    def seen(response: dict[str, Any]) -> Seen:
        texts = {"reasoning": "", "message": ""}
        for item in response["output"]:
            if item["type"] in texts:
                texts[item["type"]] += "".join(part["text"] for part in item["content"])
        calls = [item["arguments"] for item in response["output"] if item["type"] == "function_call"]
        return texts["reasoning"], texts["message"], calls, "tool_calls" if calls else "stop"

    grown: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            grown[event["output_index"]] = grown.get(event["output_index"], "") + event["delta"]
    last = seen(events[-1]["response"])
    assert list(grown.values()) == [text for text in (last[0], last[1], *last[2]) if text]
    return seen(answer.report([])), last


def by_messages(answer: MessagesAnswer, frames: list[bytes]) -> tuple[Seen, Seen]:
    def seen(message: dict[str, Any]) -> Seen:
        blocks = message["content"]
        thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        calls = [json.dumps(block["input"]) for block in blocks if block["type"] == "tool_use"]
        return thought, text, calls, {"tool_use": "tool_calls"}[message["stop_reason"]]

    return seen(answer.report([])), seen(streamed_message(b"".join(frames).decode()))


ANSWERS: dict[type[Any], Any] = {ChatAnswer: by_chat, ResponsesAnswer: by_responses, MessagesAnswer: by_messages}


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("name", sorted(TOOLS))
@pytest.mark.parametrize("reasoning", sorted(REASONING))
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.features("tools", "thoughts", "streaming")
def test_deltas_add_up_to_the_message(kind: type[Any], name: str, reasoning: str, parallel: bool) -> None:
    """However the text falls into pieces, in every protocol and format."""
    begin, end = REASONING[reasoning]
    text = f"{begin}\nHm.\n{end}\n{WRITTEN[name]}"
    box = Toolbox(TOOLS[name], (Tool("weather", "", {}),), parallel=parallel)

    class Plain:
        token_bytes: tuple[bytes, ...] = ()

    def answer() -> Any:
        return kind("x", "m", Plain(), 1, Reading(box, reasoning))

    said = "I look." if name in ("hermes", "mistral") else ""
    expected = ("Hm.", said, list(ARGUMENTS if parallel else ARGUMENTS[:1]), "tool_calls")
    for size in (1, 2, 3, 7, 1000):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        whole, streamed = answer(), answer()
        whole.add(Chunk(0, 0, text, (1, 2), finish_reason="stop"))
        frames = streamed.opening()
        for place, piece in enumerate(pieces):
            last = place == len(pieces) - 1
            frames += streamed.frames(Chunk(0, 0, piece, (1,), finish_reason="stop" if last else None))
        frames += streamed.closing([], usage=False, timed=False)
        assert ANSWERS[kind](whole, frames) == (expected, expected), size


def test_a_format_for_every_way_to_call() -> None:
    for form in TOOLS.values():
        box = toolbox_of([WEATHER, TIME], "required", None, form)
        assert box is not None
        assert len(box.call_id()) == (9 if form.name == "mistral" else 29)
        assert box.call_id("given") == "given"
    with pytest.raises(ApiError):
        toolbox_of([WEATHER], {"type": "tool"}, None, TOOLS["json"])


@pytest.mark.parametrize("name", ["none", "auto", "required"])
def test_a_tool_may_be_called_anything(name: str) -> None:
    """A tool's name is not taken for the word."""
    tools = [{"type": "function", "function": {"name": name}}, WEATHER]
    chosen = {"type": "function", "function": {"name": name}}
    box = toolbox_of(tools, chosen, None, TOOLS["json"])
    assert box is not None
    assert (box.must, box.only) == (True, name)
    grammars = {json.dumps(choice): _grammar(tools, choice) for choice in (chosen, "required", "auto")}
    assert len(set(grammars.values())) == 3
    assert WEATHER["function"]["name"] not in grammars[json.dumps(chosen)]
    assert toolbox_of(tools, "none", None, TOOLS["json"]) is None


def _grammar(tools: list[Any], choice: Any) -> str:
    class Plain:
        special: ClassVar[dict[str, int]] = {}

    box = toolbox_of(tools, choice, None, TOOLS["json"])
    assert box is not None
    return box.grammar(Plain())  # type: ignore[arg-type]


def test_tools_are_bounded_together() -> None:
    """Each may be large, all of them may not: whoever reads them has other things to do."""
    schema = {"enum": [str(n) for n in range(3000)]}
    tools = [{"type": "function", "function": {"name": f"t{n}", "parameters": schema}} for n in range(20)]
    with pytest.raises(ApiError, match="at most 20000 values") as error:
        toolbox_of(tools, "auto", None, TOOLS["json"])
    assert (error.value.status, error.value.param) == (400, "tools")
    assert toolbox_of(tools[:5], "auto", None, TOOLS["json"]) is not None
