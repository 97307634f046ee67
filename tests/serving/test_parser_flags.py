"""--tool-call-parser and --reasoning-parser go before what the chat template says, on a live server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from slipstream.text.parsers import reasoning_of, tool_format_of
from tests.conftest import write_tiny_gguf
from tests.serving.conftest import KEY, start, stop

ARGUMENTS = '{"zone": "UTC"}'
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "time", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3": f'<|python_tag|>{{"name": "time", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "time", "arguments": {ARGUMENTS}}}]',
    "json": f'[{{"name": "time", "arguments": {ARGUMENTS}}}]',
}
"""A call as each format writes it, and as the one that the template would lead to does not."""
MARKS = {"think": "<think>{}</think>", "seed": "<seed:think>{}</seed:think>", "mistral": "[THINK]{}[/THINK]"}
TOOL: Any = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "temperature": 0.0}


def said(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, template: str, *flags: str, **body: Any) -> Any:
    """The message of a server with some flags, whose model says a text and whose template has some marks in it."""
    monkeypatch.setattr("tests.conftest.TEMPLATE", f"{{# {template} #}}{{{{ messages[0].content }}}}")
    write_tiny_gguf(folder / "parrot.gguf", says=text)
    server = start(folder / "parrot.gguf", "--api-key", KEY, "--threads", "1", "--kv-cache-gb", "0.01", *flags)
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        return client.chat.completions.create(**ASK, **body).choices[0].message.model_dump()
    finally:
        stop(server)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_tool_call_parser(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "<tool_call>" if name == "mistral" else "[TOOL_CALLS]"
    assert tool_format_of(template).name != name
    message = said(tmp_path, monkeypatch, CALLS[name], template, "--tool-call-parser", name, tools=[TOOL])
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("time", {"zone": "UTC"})
    assert not message["content"]


@pytest.mark.parametrize("name", [*sorted(MARKS), "none"])
def test_the_reasoning_parser(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = MARKS.get(name, MARKS["think"]).format("Hm.") + "Yes."
    template = MARKS["seed"] if name in ("think", "mistral") else MARKS["think"]
    assert reasoning_of(template) not in (name, None)
    message = said(tmp_path, monkeypatch, text, template, "--reasoning-parser", name)
    if name == "none":
        assert (message["content"], message.get("reasoning_content")) == (text, None)
    else:
        assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")
