"""SentencePiece with byte fallback: what no piece writes is written in bytes, and comes back however it arrives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.text import load_tokenizer
from slipstream.text.tokenizer import Tokenizer
from slipstream.weights.gguf import read_gguf
from tests.weights.gguf_files import build

SPECIAL, PIECES = ["<pad>", "<eos>", "<bos>", "<unk>"], ["▁", "a", "b", "é", "▁a", "▁ab", "中"]
BYTES = len(SPECIAL)
"""Where Gemma's vocabulary has its bytes, too."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As Gemma's: bytes after the special tokens, and no space before a text."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [3, 3, 3, 2, *[6] * 256, *[1] * len(PIECES)],
        "scores": [0] * BYTES + [0] * 256 + [-index for index in range(len(PIECES))],
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "add_space_prefix": False,
    }
    file = tmp_path_factory.mktemp("sentencepiece") / "vocabulary.gguf"
    file.write_bytes(build({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}))
    return load_tokenizer(read_gguf(file))


def one_by_one(tokenizer: Tokenizer, tokens: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join(map(detokenizer.add, tokens)) + detokenizer.finish()


def test_every_byte(tokenizer: Tokenizer) -> None:
    """The bytes of UTF-8 come from characters; those that are in none are U+FFFD, and no other is lost with them."""
    reached = set()
    for code in [*range(0x800), *range(0x800, 0xD800, 61), *range(0xE000, 0x110000, 997)]:
        text = chr(code)
        if text in " ▁" or text in PIECES:
            continue
        tokens = tokenizer.encode(f"a{text}b", add_bos=False)
        raw = [token - BYTES for token in tokens[1:-1]]
        assert bytes(raw) == text.encode()
        assert tokenizer.decode(tokens) == one_by_one(tokenizer, tokens) == f"a{text}b"
        reached.update(raw)
    written_otherwise = set(b" ab")
    assert reached == set(range(256)) - written_otherwise - {0xC0, 0xC1, *range(0xF5, 0x100)}
    for byte in range(256):
        assert tokenizer.token_bytes[BYTES + byte] == bytes([byte])
        between = [tokenizer.encode(letter, add_bos=False)[0] for letter in "ab"]
        between.insert(1, BYTES + byte)
        assert one_by_one(tokenizer, between) == bytes([97, byte, 98]).decode("utf-8", "replace")


@given(text=st.text(st.sampled_from("ab éè中文🙂\n\0\x7f\u0301")) | st.text().filter(lambda text: "▁" not in text))
def test_every_text(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokens[0] == 2
    assert not {0, 1, 3} & set(tokens), "nothing is unknown, and no text is a special token"
    assert tokenizer.decode(tokens) == one_by_one(tokenizer, tokens) == text


def test_pieces_are_taken_first(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(" ab é", add_bos=False)
    assert [tokenizer.inner.id_to_token(token) for token in tokens] == ["▁ab", "▁", "é"]
