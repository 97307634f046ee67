"""Vocabularies in GGUF files: lists of wrong lengths, names given twice, merges of nothing, no text (class 12)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ModelFileError, SlipstreamError
from slipstream.text import load_tokenizer
from slipstream.text.tokenizer import Tokenizer, byte_alphabet
from slipstream.weights.open import open_checkpoint
from tests.weights.gguf_files import build


def vocabulary(kind: str) -> dict[str, Any]:
    """The metadata of a small tokenizer: all bytes, a special token, and a merge."""
    tokens: list[Any] = [*byte_alphabet(), "<s>", "ab"]
    common: dict[str, Any] = {"general.architecture": "llama", "tokenizer.ggml.model": kind}
    common |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * 256 + [3, 1]}
    if kind == "gpt2":
        return common | {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["a b"]}
    return common | {"tokenizer.ggml.scores": list(range(258))}


def tokenizer_of(path: Path, kind: str, **changes: Any) -> Tokenizer:
    """Of a file whose metadata differs so from what is right; None leaves a field out."""
    metadata = vocabulary(kind) | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    file = path / "vocabulary.gguf"
    file.write_bytes(build({name: value for name, value in metadata.items() if value is not None}))
    return load_tokenizer(open_checkpoint(file))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
class Test12Tokenizers:
    @pytest.mark.parametrize(
        "changes",
        [
            {"tokens": None}, {"tokens": 5}, {"tokens": [1] * 258}, {"model": "evil"}, {"model": 7}, {"model": None},
            {"token_type": [1] * 3}, {"token_type": [1] * 999}, {"tokens": [*byte_alphabet(), "<s>", "a" * 80_000]},
            {"tokens": [*byte_alphabet(), "<s>", b"\xff\xfe"]}, {"tokens": [*byte_alphabet(), "<s>", b"\xed\xa0\x80"]},
        ],
    )  # fmt: skip
    def test_what_cannot_be_is_one_clear_error(self, kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
        begun = time.monotonic()
        with pytest.raises(SlipstreamError, match="tokenizer"):
            tokenizer_of(tmp_path, kind, **changes)
        assert time.monotonic() - begun < 10.0

    @pytest.mark.parametrize("scores", [None, [1], [1] * 259, ["x"] * 258, 5])
    def test_scores(self, kind: str, scores: Any, tmp_path: Path) -> None:
        """Only SentencePiece has them."""
        if kind == "llama":
            with pytest.raises(ModelFileError, match=r"scores: is missing or not of 258 numbers"):
                tokenizer_of(tmp_path, kind, scores=scores)
        else:
            assert tokenizer_of(tmp_path, kind, scores=scores).encode("ab") == [257]

    @pytest.mark.parametrize(
        ("changes", "merges"),
        [
            ({"merges": ["zz yy", "a zz", "zz", "a  b", " ", "", "a b c", "b a"]}, ["llama"]),
            ({"merges": [1, 2]}, ["llama"]), ({"merges": ["a b"] * 1000}, ["gpt2", "llama"]),
            ({"token_type": [-5, 99] * 129}, ["gpt2"]), ({"token_type": "x"}, ["gpt2", "llama"]),
            ({"token_type": [6] * 258}, ["gpt2"]),
            ({"bos_token_id": 10**9, "eos_token_id": [1, 2], "unknown_token_id": "x"}, ["gpt2", "llama"]),
        ],
    )  # fmt: skip
    def test_what_means_nothing_is_left_out(
        self, kind: str, changes: dict[str, Any], merges: list[str], tmp_path: Path
    ) -> None:
        """Every text is still encoded, and comes back. SentencePiece's merges are made from its normal tokens."""
        tokenizer = tokenizer_of(tmp_path, kind, **changes)
        tokens = tokenizer.encode("ab<s>", add_bos=False)
        assert (257 in tokens) is (kind in merges)
        assert tokenizer.decode(tokens) == "ab<s>"
        assert 256 not in tokens
        assert tokenizer.longest_token < 10, "all can be shown"

    @pytest.mark.parametrize("tokens", [["a"] * 258, [*byte_alphabet(), "a", "a"], ["a", *[""] * 257]])
    def test_two_of_a_name(self, kind: str, tokens: list[str], tmp_path: Path) -> None:
        """The last one is found, the others stand for nothing."""
        tokenizer = tokenizer_of(tmp_path, kind, tokens=tokens, token_type=None)
        assert tokenizer.encode("a", add_bos=False) == [max(i for i, token in enumerate(tokens) if token == "a")]
        assert len(tokenizer.token_bytes) == 258
        assert "a" in tokenizer.decode(range(258))
