"""Tokenizers of GGUF files: byte-level BPE and SentencePiece, rebuilt on Hugging Face `tokenizers`.

Building takes a while for large vocabularies; the result is kept beside the packed weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from slipstream.errors import ModelFileError, UnsupportedModelError
from slipstream.paths import cache_folder
from slipstream.text.pretokenizers import PRE_TOKENIZERS
from slipstream.text.tokenizer import Tokenizer, byte_alphabet
from slipstream.weights import Checkpoint
from slipstream.weights.gguf import number_array, string_array

log = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types as GGUF numbers them."""

END_OF_GENERATION = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|eom_id|>"),
        *("<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]"),
        *("<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
        *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    )
)
"""Control tokens that end an answer whatever the file's own ids say."""

VERSION = 4
LONGEST_TOKEN = 4096
"""Characters of a token that are believed: cutting it in two in every way takes time that grows with their square."""
_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load_gguf(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer in a file's metadata. Raises ModelFileError or UnsupportedModelError."""
    path, meta = checkpoint.files[0], dict(checkpoint.metadata)
    tokens = string_array(meta, "tokenizer.ggml.tokens")
    if not tokens:
        raise ModelFileError(path, "tokenizer.ggml.tokens", "is missing or not a list of strings")
    types = _types(path, meta, len(tokens))
    kind = meta.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(f"{path}: tokenizer {str(kind)[:40]!r} is not supported, only gpt2 and llama")
    byte_level = kind == "gpt2"
    inner = _built(path, meta, tokens, types, byte_level)
    added = inner.get_added_tokens_decoder()
    bos, eos = _id(meta, "bos", tokens), _id(meta, "eos", tokens)
    template = meta.get("tokenizer.chat_template")
    return Tokenizer(
        inner,
        _TokenBytes(inner, types, byte_level),
        {token.content: i for i, token in added.items() if token.special},
        bos,
        frozenset(
            {i for i, token in added.items() if token.content in END_OF_GENERATION}
            | {i for name in ("eos", "eot", "eom") if (i := _id(meta, name, tokens)) is not None}
        ),
        add_bos=bool(meta.get("tokenizer.ggml.add_bos_token", not byte_level or _adds_bos(meta))),
        strip_first_space=not byte_level and _adds_space(meta),
        chat_template=template if isinstance(template, str) else None,
        names={
            "bos_token": (inner.id_to_token(bos) or "") if bos is not None else "",
            "eos_token": (inner.id_to_token(eos) or "") if eos is not None else "",
        },
    )


def _types(path: Path, meta: dict[str, Any], count: int) -> npt.NDArray[np.int32]:
    stored = number_array(meta, "tokenizer.ggml.token_type")
    if stored is None:
        return np.full(count, NORMAL, np.int32)
    if len(stored) != count:
        raise ModelFileError(path, "tokenizer.ggml.token_type", f"has {len(stored)} entries for {count} tokens")
    return stored.astype(np.int32)


def _id(meta: dict[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    value = meta.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) and 0 <= value < len(tokens) else None


def _adds_bos(meta: dict[str, Any]) -> bool:
    return PRE_TOKENIZERS.get(str(meta.get("tokenizer.ggml.pre")), PRE_TOKENIZERS["gpt-2"]).add_bos


def _adds_space(meta: dict[str, Any]) -> bool:
    return bool(meta.get("tokenizer.ggml.add_space_prefix", True))


class _TokenBytes(Sequence[bytes]):
    """The bytes each token stands for, found when first asked for."""

    def __init__(self, inner: tokenizers.Tokenizer, types: npt.NDArray[np.int32], byte_level: bool):
        self._inner, self._types, self._byte_level = inner, types, byte_level
        self._alphabet = byte_alphabet()
        self._found: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._types)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        found = self._found.get(index)
        if found is None:
            found = self._found[index] = self._find(index)
        return found

    def _find(self, index: int) -> bytes:
        kind, token = self._types[index], self._inner.id_to_token(index) or ""
        if kind in (CONTROL, UNKNOWN, UNUSED):
            return b""
        if kind == BYTE and (match := _BYTE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if kind == USER_DEFINED:
            return token.encode("utf-8", "surrogateescape")
        if self._byte_level:
            return bytes(self._alphabet[c] for c in token if c in self._alphabet)
        return token.replace(_SPACE, " ").encode("utf-8", "surrogateescape")


def _built(
    path: Path, meta: dict[str, Any], tokens: Sequence[str], types: npt.NDArray[np.int32], byte_level: bool
) -> tokenizers.Tokenizer:
    """The library's object, from the cache if this file's was built before."""
    stat = path.stat()
    name = hashlib.sha256(repr((VERSION, path.name, stat.st_size, stat.st_mtime_ns)).encode()).hexdigest()
    kept = cache_folder() / "tokenizers" / f"{name[:32]}.json"
    try:
        return tokenizers.Tokenizer.from_file(str(kept))
    except Exception:  # the library raises plain Exception for a missing or damaged file
        pass
    _check(path, tokens)
    build = _build_byte_level if byte_level else _build_sentencepiece
    inner = build(path, meta, list(tokens), types.tolist())
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_suffix(f".{os.getpid()}")
        temporary.write_text(_quick_to_load(inner), encoding="utf-8")
        temporary.replace(kept)
    except Exception as error:
        log.warning("the tokenizer is not kept: %s", error)
    return inner


def _check(path: Path, tokens: Sequence[str]) -> None:
    """Raise ModelFileError for tokens that no vocabulary can have."""
    longest = max(map(len, tokens))
    if longest > LONGEST_TOKEN:
        raise ModelFileError(
            path, "tokenizer.ggml.tokens", f"has a token of {longest} characters, more than {LONGEST_TOKEN}"
        )
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError as error:
        raise ModelFileError(path, "tokenizer.ggml.tokens", "has a token that is not UTF-8") from error


def _quick_to_load(inner: tokenizers.Tokenizer) -> str:
    """The library's JSON with merges written "a b", which it reads in half the time of ["a", "b"]."""
    description = json.loads(inner.to_str())
    merges = description["model"]["merges"]
    if not any(" " in part for merge in merges for part in merge):
        description["model"]["merges"] = [" ".join(merge) for merge in merges]
    return json.dumps(description, ensure_ascii=False, separators=(",", ":"))


def _add_tokens(inner: tokenizers.Tokenizer, meta: dict[str, Any], tokens: list[str], types: list[int]) -> None:
    """Control tokens are special, user-defined ones always matched; Phi-3's swallow the space after them."""
    phi3 = str(meta.get("general.name", "")).lower().replace("-", "").startswith("phi3")
    plain = ("<unk>", "<s>", "<|endoftext|>")
    for kinds, special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
        added = [
            AddedToken(token, special=special, normalized=False, rstrip=phi3 and token not in plain)
            for token, kind in zip(tokens, types, strict=True)
            if kind in kinds and token
        ]
        inner.add_special_tokens(added) if special else inner.add_tokens(added)


def _build_byte_level(path: Path, meta: dict[str, Any], tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    name = str(meta.get("tokenizer.ggml.pre", "default"))
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedModelError(f"{path}: pre-tokenizer {name[:40]!r} is not supported; known: {known}")
    pre = PRE_TOKENIZERS[name]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for merge in string_array(meta, "tokenizer.ggml.merges"):
        left, separator, right = merge.partition(" ")
        if separator and left + right in vocabulary and {left, right} <= vocabulary.keys():
            merges.append((left, right))  # others could never produce a token
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in pre.expressions]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
    inner.decoder = decoders.ByteLevel()
    _add_tokens(inner, meta, tokens, types)
    return inner


def _build_sentencepiece(path: Path, meta: dict[str, Any], tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    scores = number_array(meta, "tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelFileError(path, "tokenizer.ggml.scores", f"is missing or not of {len(tokens)} numbers")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i, token in enumerate(tokens):
        if types[i] != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-float(scores[i]), i, cut, left, right))
    merges.sort()
    unknown = _id(meta, "unknown", tokens)
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            [merge[3:] for merge in merges],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend(_SPACE)] if _adds_space(meta) else []
    inner.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    inner.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_tokens(inner, meta, tokens, types)
    return inner
