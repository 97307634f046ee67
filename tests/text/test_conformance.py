"""GGUF tokenizers against llama.cpp's own test pairs (ggml-vocab-*.gguf with .inp and .out).

The files are not shipped: SLIPSTREAM_TEST_VOCABS names a folder that has them. A small set of pairs for
the default model is kept here.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slipstream.text import load_tokenizer
from slipstream.weights.gguf import read_gguf

FOLDER = Path(os.environ.get("SLIPSTREAM_TEST_VOCABS", "nowhere"))
SEPARATOR = "\n__ggml_vocab_test__\n"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("ggml-vocab-*.gguf")), ids=lambda p: p.stem)
def test_pairs(path: Path) -> None:
    tokenizer = load_tokenizer(read_gguf(path))
    texts = path.with_suffix(".gguf.inp").read_text(encoding="utf-8").split(SEPARATOR)[:-1]
    lines = path.with_suffix(".gguf.out").read_text().splitlines()
    assert len(texts) == len(lines) == 46
    for text, line in zip(texts, lines, strict=True):
        assert tokenizer.encode(text, add_bos=False) == [int(token) for token in line.split()], text
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text
