"""Text that means more than it says: chat templates, grammars, what models say of tools (classes 3, 4 and 5)."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from slipstream.engine.desk import MOST_SECONDS
from slipstream.text import load_tokenizer
from slipstream.text.parsers import TOOLS, CallArguments, CallBegins, OutputParser
from slipstream.text.sandbox import TemplateError
from slipstream.text.template import ChatTemplate
from slipstream.text.tokenizer import Tokenizer, byte_alphabet
from slipstream.weights import Checkpoint
from slipstream.weights.open import open_checkpoint
from tests.attacks.helpers import SOURCE, engines_of, names_in
from tests.conftest import write_tiny_gguf
from tests.serving.conftest import COMMAND, KEY, Server, start, stop
from tests.weights.gguf_files import build

SOURCES = (
    "{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}", "{{ lipsum.__globals__['os'] }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% set ns = namespace(a='x') %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}{{ ns.a }}",
    "{{ 'x' * 10**9 }}", "{{ messages|attr('__class__') }}", "{% include '/etc/passwd' %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ 9**9**9 }}", "{{ '%99999999d' % 1 }}",
)  # fmt: skip
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
USER = [{"role": "user", "content": "x"}]


def from_gguf(folder: Path, template: Any) -> Tokenizer:
    """A tokenizer with the template that a GGUF file carries."""
    metadata = {
        "general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*byte_alphabet(), "<s>"], "tokenizer.ggml.token_type": [1] * 256 + [3],
        "tokenizer.chat_template": template,
    }  # fmt: skip
    (folder / "model.gguf").write_bytes(build(metadata))
    return load_tokenizer(open_checkpoint(folder / "model.gguf"))


def from_config(folder: Path, template: Any) -> Tokenizer:
    """With the one in tokenizer_config.json."""
    vocabulary = {character: number for number, character in enumerate(byte_alphabet())}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return load_tokenizer(Checkpoint("safetensors", (folder / "model.safetensors",), {}, {}))


def from_named(folder: Path, template: Any) -> Tokenizer:
    """With one of several there."""
    return from_config(folder, [{"name": "rag", "template": "a"}, {"name": "default", "template": template}])


def from_jinja(folder: Path, template: Any) -> Tokenizer:
    """With the file beside it, which goes before."""
    (folder / "chat_template.jinja").write_text(template)
    return from_config(folder, "not this one")


class Test3Templates:
    @pytest.mark.parametrize("source", SOURCES)
    def test_a_template_reaches_nothing_and_ends(self, source: str) -> None:
        begun = time.monotonic()
        try:
            text = ChatTemplate(source).render([{"role": "user", "content": "x"}])
        except TemplateError:
            text = ""
        assert "class" not in text
        assert len(text) < 1 << 24
        assert time.monotonic() - begun < 20

    @pytest.mark.parametrize(
        "variables", [{"tokenize": True}, {"chat_template": "{{ 1 }}"}, {"messages": []}, {"enable_thinking": {"a": 1}}]
    )
    def test_a_request_sets_only_what_is_listed(self, tenants: Server, variables: dict[str, Any]) -> None:
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": variables, "max_tokens": 2}
        with tenants.client() as http:
            assert http.post("/v1/chat/completions", json=body).status_code == 400


@pytest.mark.parametrize("carried", [from_gguf, from_config, from_named, from_jinja])
class Test3CarriedTemplates:
    """What comes with a model's files is no better than what anybody sends."""

    @pytest.mark.parametrize("source", [*SOURCES, ENDLESS])
    def test_it_reaches_nothing_and_ends(
        self, carried: Any, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("slipstream.text.template.MAX_SECONDS", 0.1)
        tokenizer = carried(tmp_path, source)
        assert tokenizer.chat_template == source
        begun = time.monotonic()
        try:
            text = tokenizer.decode(tokenizer.encode_chat(ChatTemplate(tokenizer.chat_template), USER))
        except TemplateError:
            text = ""
        assert "class" not in text
        assert len(text) < 1000
        assert time.monotonic() - begun < 20

    @pytest.mark.parametrize("source", ["{% for %}", "{{", "x" * (2 << 20), "{% evil %}", "{{ x|evil }}"])
    def test_one_that_is_none_is_a_clear_error(self, carried: Any, source: str, tmp_path: Path) -> None:
        template = carried(tmp_path, source).chat_template
        with pytest.raises(TemplateError, match="chat template"):
            ChatTemplate(template)


@pytest.mark.parametrize("template", [5, True, ["a", "b"], [1, 2], 0.5])
def test_3_a_template_that_is_no_text_is_none(template: Any, tmp_path: Path) -> None:
    assert from_gguf(tmp_path, template).chat_template is None
    assert from_config(tmp_path, template).chat_template is None
    assert from_config(tmp_path, [{"name": "default", "template": template}]).chat_template is None
    assert from_config(tmp_path, {"default": template}).chat_template is None


class Test3Served:
    """Models whose templates are evil, on a live server."""

    @pytest.fixture
    def looping(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
        """Its template goes on for ever if the first message says so."""
        evil = "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
        monkeypatch.setattr("tests.conftest.TEMPLATE", evil)
        write_tiny_gguf(tmp_path / "evil.gguf")
        running = start(tmp_path / "evil.gguf", "--api-key", KEY, "--threads", "1", "--kv-cache-gb", "0.01")
        yield running
        stop(running)

    def test_a_loop_is_that_requests_error_and_nobody_elses(self, looping: Server) -> None:
        order: list[str] = []
        chat = {"messages": [{"role": "user", "content": "loop"}], "max_tokens": 2}

        def loop(path: str) -> None:
            with looping.client() as http:
                answer = http.post(path, json=chat)
            assert 400 <= answer.status_code < 600
            order.append(f"{path} {answer.status_code} {'chat template: it ran for more than' in answer.text}")

        paths = ("/v1/chat/completions", "/v1/messages")
        threads = [threading.Thread(target=loop, args=(path,)) for path in paths]
        for thread in threads:
            thread.start()
        with looping.client() as http:
            while any(thread.is_alive() for thread in threads):
                assert http.post("/v1/completions", json={"prompt": "loop", "max_tokens": 2}).status_code == 200
                assert http.get("/health").status_code == 200
                order.append("others")
            good = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
            assert http.post("/v1/chat/completions", json=good).status_code == 200
        assert {f"{path} 400 True" for path in paths} < set(order)
        assert order.index("others") < min(order.index(f"{path} 400 True") for path in paths), "they do not wait"

    def test_a_broken_one_is_an_error_at_the_start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tests.conftest.TEMPLATE", "{% for %}")
        write_tiny_gguf(tmp_path / "broken.gguf")
        command = [*COMMAND, str(tmp_path / "broken.gguf"), "--port", "0", "--threads", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0
        assert "chat template" in done.stderr
        assert "Traceback" not in done.stderr
        assert not engines_of(tmp_path / "broken.gguf"), "no process is left"


def soonest(send: Callable[[int], None]) -> float:
    """The least seconds of three: other work on the machine comes and goes, what is wrong is always so."""
    seconds = []
    for number in range(3):
        begun = time.monotonic()
        send(number)
        seconds.append(time.monotonic() - begun)
    return min(seconds)


class Test4Grammars:
    @pytest.mark.parametrize(
        "body",
        [
            {"guided_regex": "(" * 30_000}, {"guided_regex": "a" * 5000}, {"guided_json": {"type": 7}},
            {"guided_json": {"properties": [1]}}, {"guided_json": {"$ref": "#/a/b/c"}},
            {"guided_grammar": "start: nowhere"},
            {"guided_json": {"type": "string", "pattern": "[" * 999}}, {"guided_grammar": "(" * 30_000},
            {"guided_choice": ["x"] * 200_000},
        ],
    )  # fmt: skip
    def test_a_bad_grammar_is_a_400_soon(self, tenants: Server, body: dict[str, Any]) -> None:
        def send(_: int) -> None:
            with tenants.client() as http:
                answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, **body})
            assert answer.status_code == 400, answer.text[:300]

        assert soonest(send) < MOST_SECONDS
        with tenants.client() as http:
            assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200

    @pytest.mark.parametrize(
        ("pattern", "said"),
        [
            ("(a|a)*b", "a*b?"), ("(.*a){30}", ".*"), ("((a{1,999}){1,999}){1,999}", "a+"), ("^(a+)+$", "a+"),
            ("^(a|aa)+$", "a+"), ("(a+)+" * 500 + "$", None),
        ],
    )  # fmt: skip
    def test_a_pattern_that_others_choke_on_costs_no_time(
        self, tenants: Server, pattern: str, said: str | None
    ) -> None:
        """Matching takes time that grows with the text, whatever the pattern: it is kept to, or refused, soon."""

        def send(number: int) -> None:
            regex = "(?:" * number + pattern + ")" * number  # another text: what is known is not compiled again
            with tenants.client() as http:
                answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 20, "guided_regex": regex})
            assert answer.status_code == (400 if said is None else 200), answer.text[:300]
            assert said is None or re.fullmatch(said, answer.json()["choices"][0]["text"])

        assert soonest(send) < MOST_SECONDS


class Test5ToolParsers:
    def test_parsers_evaluate_nothing(self) -> None:
        found = [
            f"{path}:{line} {name}"
            for path in (SOURCE / "slipstream" / "text").rglob("*.py")
            for line, name in names_in(path.read_text())
            if name in ("eval", "exec", "compile", "__import__", "ast.literal_eval", "importlib.import_module")
        ]
        assert not found

    @pytest.mark.parametrize(
        "text",
        [
            "__import__('os').system('touch {mark}')", "[__import__('pathlib').Path('{mark}').touch()]",
            "<tool_call>__import__('os').system('touch {mark}')</tool_call>",
            '<tool_call>{{"name": "f", "arguments": __import__("os").system("touch {mark}")}}</tool_call>',
            "<|python_tag|>import os; os.system('touch {mark}')", "[TOOL_CALLS]f[ARGS]__import__('os')",
        ],
    )  # fmt: skip
    def test_what_a_model_says_is_not_run(self, text: str, tmp_path: Path) -> None:
        mark = tmp_path / "mark"
        for form in TOOLS.values():
            parser = OutputParser(form, ["f"])
            events = [*parser.feed(text.format(mark=mark)), *parser.finish()]
            assert all(isinstance(e.text if not isinstance(e, CallBegins) else e.name, str) for e in events)
        assert not mark.exists()

    def test_deep_nesting_does_not_overflow(self) -> None:
        deep = '{"name": "f", "arguments": ' + '{"a": [' * 50_000
        for form in ("hermes", "llama3", "json"):
            parser = OutputParser(TOOLS[form], ["f"])
            events = parser.feed("<tool_call>" + deep if form == "hermes" else deep) + parser.finish()
            assert any(isinstance(event, CallArguments) for event in events)
