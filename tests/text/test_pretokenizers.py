"""Pre-tokenizers: where each cuts contractions, digits, scripts, white space, accents and emoji.

The cuts are those of the expressions in llama.cpp's llama-vocab.cpp, found with Python's `regex`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.text import load_tokenizer
from slipstream.text.pretokenizers import PRE_TOKENIZERS
from slipstream.text.tokenizer import Tokenizer, byte_alphabet
from slipstream.weights.gguf import read_gguf
from tests.weights.gguf_files import build

CUTS = {
    "gpt-2 gpt2 phi-2 mpt olmo jais jina-es jina-de gigachat a.x-4.0 mellum exaone4 trillion granite-docling": [
        "I¦'ll¦ IT¦'¦S¦ (¦x¦).¦y¦ !?/¦\n¦/",
        "1234567¦ x¦89²",
        "ab中文かな¦ 한국어",
        "a¦ \n\n ¦ b¦\r\n¦\t¦c¦  ",
        "cafe¦\u0301¦ ÀÉß¦ HelloWORLDFoo",
        "🙂🙂.¦ `$¦a¦_¦b¦`¦ é¦…",
    ],
    "smollm starcoder refact command-r codeshell exaone minerva-7b": [
        "I¦'ll¦ IT¦'¦S¦ (¦x¦).¦y¦ !?/¦\n¦/",
        "1¦2¦3¦4¦5¦6¦7¦ x¦8¦9¦²",
        "ab中文かな¦ 한국어",
        "a¦ \n\n ¦ b¦\r\n¦\t¦c¦  ",
        "cafe¦\u0301¦ ÀÉß¦ HelloWORLDFoo",
        "🙂🙂.¦ `$¦a¦_¦b¦`¦ é¦…",
    ],
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe chatglm-bpe glm4": [
        "I¦'ll¦ IT¦'S¦ (¦x¦).¦y¦ !?/\n¦/",
        "123¦456¦7¦ x¦89²",
        "ab中文かな¦ 한국어",
        "a¦ \n\n¦ ¦ b¦\r\n¦\tc¦  ",
        "cafe¦\u0301¦ ÀÉß¦ HelloWORLDFoo",
        "🙂🙂.¦ `$¦a¦_b¦`¦ é¦…",
    ],
    "qwen2 deepseek-r1-qwen kormo hunyuan solar-open grok-2 megrez stablelm2": [
        "I¦'ll¦ IT¦'S¦ (¦x¦).¦y¦ !?/\n¦/",
        "1¦2¦3¦4¦5¦6¦7¦ x¦8¦9¦²",
        "ab中文かな¦ 한국어",
        "a¦ \n\n¦ ¦ b¦\r\n¦\tc¦  ",
        "cafe¦\u0301¦ ÀÉß¦ HelloWORLDFoo",
        "🙂🙂.¦ `$¦a¦_b¦`¦ é¦…",
    ],
    "qwen35": [
        "I¦'ll¦ IT¦'S¦ (¦x¦).¦y¦ !?/\n¦/",
        "1¦2¦3¦4¦5¦6¦7¦ x¦8¦9¦²",
        "ab中文かな¦ 한국어",
        "a¦ \n\n¦ ¦ b¦\r\n¦\tc¦  ",
        "cafe\u0301¦ ÀÉß¦ HelloWORLDFoo",
        "🙂🙂.¦ `$¦a¦_b¦`¦ é¦…",
    ],
    "tekken": [
        "I¦'ll¦ IT¦'S¦ (¦x¦).¦y¦ !?/\n/",
        "1¦2¦3¦4¦5¦6¦7¦ x¦8¦9¦²",
        "ab中文かな¦ 한국어",
        "a¦ \n\n¦ ¦ b¦\r\n¦\tc¦  ",
        "cafe\u0301¦ ÀÉß¦ Hello¦WORLDFoo",
        "🙂🙂.¦ `$¦a¦_b¦`¦ é¦…",
    ],
    "gpt-4o llama4 minimax-m2": [
        "I'll¦ IT'S¦ (¦x¦).¦y¦ !?/\n/",
        "123¦456¦7¦ x¦89²",
        "ab中文かな¦ 한국어",
        "a¦ \n\n¦ ¦ b¦\r\n¦\tc¦  ",
        "cafe\u0301¦ ÀÉß¦ Hello¦WORLDFoo",
        "🙂🙂.¦ `$¦a¦_b¦`¦ é¦…",
    ],
    "deepseek-llm": [
        "I¦'¦ll¦ IT¦'¦S¦ (¦x¦).¦y¦ !?/¦\n¦/",
        "1234567¦ x¦89²",
        "ab¦中文かな¦ ¦한국어",
        "a¦ ¦\n¦\n¦ ¦ b¦\r¦\n¦\tc¦  ",
        "cafe¦\u0301¦ ÀÉß¦ HelloWORLDFoo",
        "🙂🙂¦.¦ `$¦a¦_¦b¦`¦ é¦…",
    ],
    "deepseek-coder": [
        "I¦'¦ll¦ IT¦'¦S¦ (¦x¦).¦y¦ !?/¦\n¦/",
        "1¦2¦3¦4¦5¦6¦7¦ x¦8¦9¦²",
        "ab¦中文かな¦ ¦한국어",
        "a¦ ¦\n¦\n¦ ¦ b¦\r¦\n¦\tc¦  ",
        "cafe¦\u0301¦ ÀÉß¦ HelloWORLDFoo",
        "🙂🙂¦.¦ `$¦a¦_¦b¦`¦ é¦…",
    ],
    "deepseek-v3 hunyuan-dense": [
        "I¦'ll¦ IT¦'S¦ (¦x¦).¦y¦ !?/\n¦/",
        "123¦456¦7¦ x¦89²",
        "ab¦中文かな¦ 한국어",
        "a¦ \n\n¦ ¦ b¦\r\n¦\tc¦  ",
        "cafe\u0301¦ ÀÉß¦ HelloWORLDFoo",
        "🙂🙂.¦ `$¦a¦_b¦`¦ é¦…",
    ],
    "falcon": [
        "I¦'¦ll¦ IT¦'¦S¦ ¦(¦x¦).¦y¦ ¦!?/¦\n¦/",
        "123¦456¦7¦ x¦89²",
        "ab中文かな¦ 한국어",
        "a¦ \n\n ¦ b¦\r\n¦\t¦c¦  ",
        "cafe¦\u0301¦ ÀÉß¦ HelloWORLDFoo",
        "🙂🙂¦.¦ ¦`$¦a¦_¦b¦`¦ é¦…",
    ],
    "bloom gpt3-finnish poro-chat": [
        "I'll¦ IT'S¦ (¦x¦).¦y¦ !?¦/¦\n¦/",
        "1234567¦ x89²",
        "ab中文かな¦ 한국어",
        "a¦ \n\n ¦ b¦\r\n\t¦c¦  ",
        "cafe\u0301¦ ÀÉß¦ HelloWORLDFoo",
        "🙂🙂¦.¦ `$a_b`¦ é¦…",
    ],
    "viking": [
        "I'll¦ IT'S¦ (¦x¦).¦y¦ !?¦/¦\n¦/",
        "1¦2¦3¦4¦5¦6¦7¦ x¦8¦9¦²",
        "ab中文かな¦ 한국어",
        "a¦ \n\n ¦ b¦\r\n\t¦c¦  ",
        "cafe\u0301¦ ÀÉß¦ HelloWORLDFoo",
        "🙂🙂¦.¦ `$a_b`¦ é¦…",
    ],
    "superbpe": [
        "I'll IT'S (x).y !?/\n/",
        "1¦234¦567¦ x¦89²",
        "ab中文かな 한국어",
        "a \n\n  b\r\n\tc  ",
        "cafe\u0301 ÀÉß HelloWORLDFoo",
        "🙂🙂. `$a_b` é…",
    ],
    "default": [
        "I¦'¦ll¦ IT¦'¦S¦ ¦(¦x¦).¦y¦ ¦!?/¦\n¦/",
        "123¦456¦7¦ x¦89²",
        "ab中文かな¦ 한국어",
        "a¦ \n\n ¦ b¦\r\n¦\t¦c¦  ",
        "cafe¦\u0301¦ ÀÉß¦ HelloWORLDFoo",
        "🙂🙂¦.¦ `¦$¦a¦_¦b¦`¦ é¦…",
    ],
}
"""By the names of those that cut alike, the same texts with a bar at every cut."""

ADD_BOS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
TAKEN_WHOLE = ADD_BOS | {"glm4"}
"""Those under which a piece that is a token needs no merges."""


def tokenizer_of(folder: Path, name: str) -> Tokenizer:
    """All bytes, a word that no merge makes, and BOS."""
    file = folder / f"{name}.gguf"
    tokens, types = [*byte_alphabet(), "word", "<s>"], [1] * 257 + [3]
    metadata = {"model": "gpt2", "pre": name, "tokens": tokens, "token_type": types, "bos_token_id": 257}
    file.write_bytes(build({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}))
    return load_tokenizer(read_gguf(file))


@pytest.mark.parametrize(("name", "texts"), [(name, texts) for names, texts in CUTS.items() for name in names.split()])
def test_cuts(name: str, texts: list[str], tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, name)
    for expected in texts:
        text = expected.replace("¦", "")
        spans = [span for _, span in tokenizer.inner.pre_tokenizer.pre_tokenize_str(text)]
        assert [text[begin:end] for begin, end in spans] == expected.split("¦")
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.encode("word", add_bos=False) == [256]) == (name in TAKEN_WHOLE)
    assert (tokenizer.encode("word")[0] == 257) == (name in ADD_BOS)


def test_all_are_tested() -> None:
    assert set(" ".join(CUTS).split()) == PRE_TOKENIZERS.keys()
