"""Text of records: messages where the template makes exactly the prompt of them, else prompt and completion."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.text import Tokenizer, load_tokenizer
from slipstream.text.template import ChatTemplate
from slipstream.training.conversations import conversation_of, text_of
from slipstream.training.records import Record
from slipstream.weights.open import open_checkpoint

TURNS = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor -%}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SILENT = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + TURNS
BRACKETS = (
    "{%- for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor -%}"
)
ASKED = [{"role": "user", "content": "two + two?"}]
LONGER = [*ASKED, {"role": "assistant", "content": "four\n"}, {"role": "user", "content": ""}]


@pytest.fixture(scope="module")
def tokenizer(tiny_gguf: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(tiny_gguf))


@pytest.mark.parametrize("source", [TURNS, SILENT, BRACKETS])
@pytest.mark.parametrize("messages", [ASKED, LONGER, [{"role": "system", "content": "s"}, *LONGER]])
def test_what_a_template_made_is_a_conversation(
    source: str, messages: list[dict[str, Any]], tokenizer: Tokenizer
) -> None:
    template = ChatTemplate(source)
    if source == BRACKETS:
        messages = [message for message in messages if message["role"] != "system"]
    prompt = tokenizer.encode_chat(template, messages)
    assert conversation_of(prompt, tokenizer, template) == messages
    answer = tokenizer.encode("4", add_bos=False)
    record = Record((*prompt, *answer), ((len(prompt), len(prompt) + 1),))
    assert text_of(record, tokenizer, template) == {"messages": [*messages, {"role": "assistant", "content": "4"}]}


def test_what_no_messages_make_is_text(tokenizer: Tokenizer) -> None:
    """A plain prompt, one of another template, and a conversation that something was put after."""
    template = ChatTemplate(TURNS)
    made = tokenizer.encode_chat(template, ASKED)
    others = tokenizer.encode_chat(ChatTemplate(BRACKETS), ASKED)
    written = tokenizer.encode("<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")  # as letters, not as tokens
    for prompt in (tokenizer.encode("abc"), others, [*made, 40], written):
        record = Record((*prompt, 64), ((len(prompt), len(prompt) + 1),))
        assert conversation_of(prompt, tokenizer, template) is None
        assert text_of(record, tokenizer, template).keys() == {"prompt", "completion"}
    assert conversation_of(tokenizer.encode("abc"), tokenizer, ChatTemplate(BRACKETS)) is None
    begun = replace(tokenizer, bos=257, add_bos=True)
    asked = begun.encode("ab")
    record = Record((*asked, 256, 66), ((len(asked) + 1, len(asked) + 2),))
    assert text_of(record, begun, None) == {"prompt": "ab<|endoftext|>", "completion": "c"}
    assert text_of(Record((64, 65, 66), ((1, 3),)), tokenizer, None) == {"prompt": "a", "completion": "bc"}
