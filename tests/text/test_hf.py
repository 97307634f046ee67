"""Tokenizers from tokenizer.json: byte-level and SentencePiece, settings beside it, bad files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from slipstream.errors import ModelFileError
from slipstream.text.hf import load_hf
from slipstream.text.tokenizer import byte_alphabet
from slipstream.weights import Checkpoint


def checkpoint(folder: Path, config: dict | None = None) -> Checkpoint:
    return Checkpoint("safetensors", (folder / "model.safetensors",), config or {}, {})


def byte_level() -> tokenizers.Tokenizer:
    vocabulary = {character: i for i, character in enumerate(byte_alphabet())}
    vocabulary["Ġa"] = 256
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, [("Ġ", "a")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    inner.add_tokens([AddedToken("ü!")])
    return inner


def test_byte_level(tmp_path: Path) -> None:
    inner = byte_level()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    inner.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    tokenizer = load_hf(checkpoint(tmp_path, {"eos_token_id": 5}))
    assert tokenizer.eos == {3, 4, 5, 258}
    assert tokenizer.add_bos
    assert tokenizer.encode(" a")[0] == tokenizer.bos == 257
    text = "x a ü! é </s>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_template == "{{ messages }}"
    (tmp_path / "chat_template.jinja").write_text("other")
    assert load_hf(checkpoint(tmp_path)).chat_template == "other"


def test_sentencepiece(tmp_path: Path) -> None:
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a"]
    inner = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_hf(checkpoint(tmp_path))
    assert tokenizer.strip_first_space
    assert not tokenizer.add_bos
    assert tokenizer.decode(tokenizer.encode("a a é")) == "a a é"


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="only fast tokenizers"):
        load_hf(checkpoint(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match="tokenizer"):
        load_hf(checkpoint(tmp_path))
