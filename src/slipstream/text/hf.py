"""Tokenizers of Hugging Face folders: tokenizer.json, with the settings kept beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import tokenizers

from slipstream.errors import ModelFileError
from slipstream.text.tokenizer import Tokenizer, byte_alphabet
from slipstream.weights import Checkpoint
from slipstream.weights.safetensors import load_json

MAX_FILE = 1 << 28
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def load_hf(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a folder. Raises ModelFileError."""
    folder = checkpoint.files[0].parent
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelFileError(path, "file", "does not exist; only fast tokenizers can be read")
    if path.stat().st_size > MAX_FILE:
        raise ModelFileError(path, "size", f"is more than {MAX_FILE >> 20} MB")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelFileError(path, "tokenizer", str(error)) from error
    inner.no_truncation()
    inner.no_padding()
    description = json.loads(inner.to_str())
    settings = load_json(folder / "tokenizer_config.json") if _exists(folder, "tokenizer_config.json") else {}
    special = {token["content"]: token["id"] for token in description["added_tokens"] if token["special"]}
    bos = inner.token_to_id(_text(settings.get("bos_token")))
    decoder = json.dumps(description.get("decoder"))
    return Tokenizer(
        inner,
        _token_bytes(inner, set(special.values()), byte_level="ByteLevel" in decoder),
        special,
        bos,
        _eos(inner, folder, checkpoint.metadata, settings),
        add_bos=bos is not None and inner.encode("a").ids[:1] == [bos],
        strip_first_space='"Strip"' in decoder,
        chat_template=_template(folder, settings),
        names={name: _text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
    )


def _exists(folder: Path, name: str) -> bool:
    return (folder / name).exists()


def _text(token: Any) -> str:
    """A token as settings write it: a string, or an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _token_bytes(inner: tokenizers.Tokenizer, special: set[int], byte_level: bool) -> list[bytes]:
    alphabet, size = byte_alphabet(), inner.get_vocab_size(with_added_tokens=True)
    vocabulary = inner.get_vocab(with_added_tokens=True)
    added = set(inner.get_added_tokens_decoder())
    result = [b""] * (max([size - 1, *vocabulary.values()]) + 1)
    for text, token in vocabulary.items():
        if token in special:
            continue
        if token in added:
            result[token] = text.encode()
        elif byte_level:
            result[token] = bytes(alphabet[c] for c in text if c in alphabet)
        elif match := _BYTE.fullmatch(text):
            result[token] = bytes([int(match[1], 16)])
        else:
            result[token] = text.replace("▁", " ").encode()
    return result


def _eos(inner: tokenizers.Tokenizer, folder: Path, config: Any, settings: dict[str, Any]) -> frozenset[int]:
    """End-of-generation ids, from the generation settings, the config, and the tokenizer's own."""
    generation = load_json(folder / "generation_config.json") if _exists(folder, "generation_config.json") else {}
    ids: set[int] = set()
    for source in (generation, config):
        value = source.get("eos_token_id")
        ids.update(x for x in (value if isinstance(value, list) else [value]) if isinstance(x, int))
    named = inner.token_to_id(_text(settings.get("eos_token")))
    return frozenset(ids if named is None else {*ids, named})


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists() and path.stat().st_size < MAX_FILE:
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
