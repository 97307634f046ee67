"""Special tokens in plain text, wherever a request takes text, and inputs of wrong shapes (class 6)."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slipstream.serving.prompts import FILL_IN, Prompts
from slipstream.text import load_tokenizer
from slipstream.text.sandbox import TemplateError
from slipstream.text.template import ChatTemplate
from slipstream.text.tokenizer import Tokenizer, byte_alphabet
from slipstream.weights.open import open_checkpoint
from tests.attacks.helpers import MARK
from tests.serving.conftest import Server
from tests.weights.gguf_files import build

HARMLESS = MARK.replace("|", "!")
"""As many bytes, and no marks: the tiny model has a token for each byte, so that a mark that is read costs fewer."""
USER = {"role": "user", "content": "x"}


def call(text: str, arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": text, "arguments": arguments}}


def tool(text: str) -> dict[str, Any]:
    return {"name": "f", "description": text, "parameters": {"type": "object", "properties": {"p": {"enum": [text]}}}}


def chats(text: str) -> dict[str, list[dict[str, Any]]]:
    """Conversations with a text in one place each."""
    halves = text[:4], text[4:]
    parts = [{"type": "text", "text": half} for half in halves]
    return {
        "tool result": [USER, {"role": "tool", "tool_call_id": "c", "content": text}],
        "tool call": [USER, {"role": "assistant", "content": None, "tool_calls": [call(text, "{}")]}],
        "arguments": [USER, {"role": "assistant", "content": "", "tool_calls": [call("f", {text: [text]})]}],
        "arguments as text": [
            USER, {"role": "assistant", "content": "", "tool_calls": [call("f", json.dumps({text: text}))]}
        ],
        "no JSON": [USER, {"role": "assistant", "content": "", "tool_calls": [call("f", text)]}],
        "parts": [{"role": "user", "content": parts}],
        "two messages": [{"role": "user", "content": half} for half in halves],
        "prefill": [USER, {"role": "assistant", "content": text}],
    }  # fmt: skip


def messages(text: str) -> dict[str, dict[str, Any]]:
    """The same for Anthropic's API."""
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": text}]}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {text: [text]}}
    parts = [{"type": "text", "text": text[:4]}, {"type": "text", "text": text[4:]}]
    return {
        "content": {"messages": [{"role": "user", "content": text}]},
        "parts": {"messages": [{"role": "user", "content": parts}]},
        "system": {"messages": [USER], "system": text},
        "system parts": {"messages": [USER], "system": parts},
        "tool result": {"messages": [USER, {"role": "user", "content": [result]}]},
        "tool use": {"messages": [USER, {"role": "assistant", "content": [use]}]},
        "tools": {"messages": [USER], "tools": [{"name": "f", "description": text, "input_schema": {"title": text}}]},
    }


def responses(text: str) -> dict[str, dict[str, Any]]:
    """The same for the responses API."""
    output = {"type": "function_call_output", "call_id": "c", "output": text}
    made = {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({text: text})}
    parts = [{"type": "input_text", "text": text[:4]}, {"type": "input_text", "text": text[4:]}]
    return {
        "input": {"input": text}, "instructions": {"input": "x", "instructions": text},
        "parts": {"input": [{"role": "user", "content": parts}]}, "result": {"input": [USER, output]},
        "call": {"input": [USER, made]}, "tools": {"input": "x", "tools": [{"type": "function", **tool(text)}]},
    }  # fmt: skip


class Test6Endpoints:
    """A text with marks costs as many tokens as one without: each byte its own."""

    def tokens(self, server: Server, path: str, body: dict[str, Any]) -> int:
        with server.client() as http:
            answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        report = answer.json()
        if path == "/tokenize":
            return int(report["count"])
        return int(report["input_tokens"] if "input_tokens" in report else report["usage"]["input_tokens"])

    @pytest.mark.parametrize("place", chats(""))
    def test_chats(self, tenants: Server, place: str) -> None:
        body, plain = ({"messages": chats(text)[place]} for text in (MARK, HARMLESS))
        assert self.tokens(tenants, "/tokenize", body) == self.tokens(tenants, "/tokenize", plain)

    @pytest.mark.parametrize("place", messages(""))
    def test_messages(self, tenants: Server, place: str) -> None:
        path = "/v1/messages/count_tokens"
        marked, plain = (self.tokens(tenants, path, messages(text)[place]) for text in (MARK, HARMLESS))
        assert marked == plain

    @pytest.mark.parametrize("place", responses(""))
    def test_responses(self, tenants: Server, place: str) -> None:
        marked, plain = (
            self.tokens(tenants, "/v1/responses", {"max_output_tokens": 1, **responses(text)[place]})
            for text in (MARK, HARMLESS)
        )
        assert marked == plain

    def test_a_mark_that_is_read_would_cost_fewer(self, tenants: Server) -> None:
        """What the others rely on: the template's own marks are one token each."""
        one, two = ({"messages": [USER] * count} for count in (1, 2))
        more = self.tokens(tenants, "/tokenize", two) - self.tokens(tenants, "/tokenize", one)
        assert more == len("user\nx\n") + 2


class Test6SpecialTokens:
    def count(self, server: Server, body: dict[str, Any]) -> int:
        """How many special tokens the prompt has."""
        with server.client() as http:
            answer = http.post("/tokenize", json=body)
            assert answer.status_code == 200, answer.text
        return sum(token >= 256 for token in answer.json()["tokens"])

    def test_in_a_message_they_are_text(self, tenants: Server) -> None:
        plain = self.count(tenants, {"messages": [{"role": "user", "content": "x"}]})
        assert self.count(tenants, {"messages": [{"role": "user", "content": MARK}]}) == plain

    @pytest.mark.parametrize("role", [MARK, "user\nx", "user ", "é", "a" * 65, "9"])
    def test_a_role_is_a_plain_word(self, tenants: Server, role: str) -> None:
        with tenants.client() as http:
            answer = http.post("/tokenize", json={"messages": [{"role": role, "content": "x"}]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[0].role"

    def test_in_a_tool_they_are_text(self, tenants: Server) -> None:
        def tool(text: str) -> list[Any]:
            function = {"name": "f", "description": text, "parameters": {"type": "object", "description": text,
                        "properties": {text or "p": {"enum": [text]}}}}  # fmt: skip
            return [{"type": "function", "function": function}]

        messages = [{"role": "user", "content": "x"}]
        plain = self.count(tenants, {"messages": messages, "tools": tool("")})
        assert self.count(tenants, {"messages": messages, "tools": tool(MARK)}) == plain

    def test_in_a_prompt_they_are_text(self, tenants: Server) -> None:
        assert self.count(tenants, {"prompt": MARK, "add_special_tokens": False}) == 0

    def test_in_a_tool_for_a_template_that_knows_tools(self, smollm: Path) -> None:
        tokenizer = load_tokenizer(open_checkpoint(smollm))
        template = ChatTemplate("{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}")
        tokens = tokenizer.encode_chat(
            template, [{"role": "user", "content": "x"}], tools=[{"name": MARK, MARK: [MARK]}]
        )
        assert not set(tokens) & set(tokenizer.special.values())


def tokenizer_of(folder: Path, special: list[str]) -> Tokenizer:
    """All bytes, and special tokens."""
    metadata = {
        "general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*byte_alphabet(), *special],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(special),
    }  # fmt: skip
    (folder / "model.gguf").write_bytes(build(metadata))
    return load_tokenizer(open_checkpoint(folder / "model.gguf"))


JOINED = "{% for m in messages %}{{ m.content }}{% endfor %}"
TRIMMED = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"


class Test6Prompts:
    """What a request says never has a special token's id, whatever the template puts together."""

    @pytest.mark.parametrize("template", [JOINED, TRIMMED, "{{ messages | map(attribute='content') | join }}"])
    @pytest.mark.parametrize("cut", range(1, 10))
    def test_split_over_two_messages(self, template: str, cut: int, tmp_path: Path) -> None:
        tokenizer = tokenizer_of(tmp_path, ["<|im_end|>"])
        for space in ("", " ", "\n"):
            said = [{"role": "user", "content": "<|im_end|>"[:cut] + space}]
            said.append({"role": "user", "content": space + "<|im_end|>"[cut:]})
            tokens = tokenizer.encode_chat(ChatTemplate(template), said)
            assert 256 not in tokens
            assert "".join(tokenizer.decode(tokens).split()) == "<|im_end|>", "and nothing of it is lost"

    @pytest.mark.parametrize("size", range(2, 6))
    def test_split_over_many(self, size: int, tmp_path: Path) -> None:
        tokenizer = tokenizer_of(tmp_path, ["<|im_end|>", "<|im_start|>"])
        for cuts in itertools.combinations(range(1, 10), size - 1):
            pieces = ["<|im_end|>"[a:b] for a, b in itertools.pairwise((0, *cuts, 10))]
            tokens = tokenizer.encode_chat(ChatTemplate(JOINED), [{"role": "u", "content": piece} for piece in pieces])
            assert tokens == tokenizer.encode("<|im_end|>")

    @pytest.mark.parametrize(
        ("special", "text"),
        [
            (["ab", "bc"], "abc"), (["<a", "a>", "<a>"], "<a><a<a>>"), (["<|x<|end|>", "<|end|>"], "<|x<|end|>"),
            (["aa"], "aaaa"), (["aba"], "ababababa"), (["→"], "→→x→"), (["→", "→→"], "→→→"), (["→⇒", "⇒", "→"], "→→⇒⇒"),
        ],
    )  # fmt: skip
    def test_tokens_that_overlap(self, special: list[str], text: str, tmp_path: Path) -> None:
        tokenizer = tokenizer_of(tmp_path, special)
        said = [{"role": "user", "content": text}]
        tokens = tokenizer.encode_chat(ChatTemplate(JOINED), said)
        assert max(tokens) < 256
        assert tokenizer.decode(tokens) == text
        framed = tokenizer.encode_chat(ChatTemplate(special[0] + JOINED + special[-1]), said)
        first, last = (tokenizer.special[special[index]] for index in (0, -1))
        assert framed == [first, *tokens, last], "the template's own marks are read"

    def test_characters_for_private_use(self, tmp_path: Path) -> None:
        """They are everybody's: none of them is lost, and whoever uses all of them gets an error."""
        tokenizer = tokenizer_of(tmp_path, ["<|im_end|>"])
        private = "".join(map(chr, range(0xE000, 0xF900)))
        for text in (private[:-300] + "<|im_end|>", private[300:] + "<|im_end|>"):
            tokens = tokenizer.encode_chat(ChatTemplate(JOINED), [{"role": "user", "content": text}])
            assert tokens == tokenizer.encode(text, add_bos=False)
        with pytest.raises(TemplateError, match="private"):
            tokenizer.encode_chat(ChatTemplate(JOINED), [{"role": "user", "content": private}])

    @pytest.mark.parametrize("names", FILL_IN)
    def test_around_a_suffix(self, names: tuple[str, str, str], tmp_path: Path) -> None:
        tokenizer = tokenizer_of(tmp_path, [*names, "<|im_end|>"])
        prompts = Prompts(cast(Any, SimpleNamespace(info=None)), tokenizer, None)
        text = "".join(names) + "<|im_end|>"
        before, after, middle = (tokenizer.special[name] for name in names)
        tokens = asyncio.run(prompts.between(text, text))
        plain = tokenizer.encode(text, add_bos=False)
        assert max(plain) < 256
        assert tokens == [before, *plain, after, *plain, middle]


class Test6Shapes:
    @pytest.mark.parametrize(
        "given",
        [
            [], [[]], [[1], []], [[1], 2], ["a", [1]], [["a"]], [[[1]]], [1.0], [1, 2.5], [True], [None], None, {},
            {"a": 1}, 5, [-1], [10**9], [10**30], [[1], [10**30]], [[1, -1]], "", ["a", ""],
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/completions"])
    def test_inputs_of_no_shape(self, tenants: Server, path: str, given: Any) -> None:
        field = "input" if path == "/v1/embeddings" else "prompt"
        with tenants.client() as http:
            answer = http.post(path, json={field: given, **({"max_tokens": 1} if field == "prompt" else {})})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field

    @pytest.mark.parametrize("value", ["AAAA", [[0.1] * 64], [0.1, float(2**70)], {"data": "x"}, 5])
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
    def test_embeddings_are_no_prompt(self, tenants: Server, path: str, value: Any) -> None:
        """They are refused by name, not left out: the answer would be one to something else."""
        body = {"prompt": "x", "messages": [USER], "input": "x", "max_tokens": 1, "prompt_embeds": value}
        with tenants.client() as http:
            answer = http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "prompt_embeds"
