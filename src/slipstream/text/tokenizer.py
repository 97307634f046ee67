"""Tokenizer: text to token ids and back, whichever file the vocabulary came from."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import tokenizers

from slipstream.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from slipstream.text.template import ChatTemplate

_PRIVATE = [chr(code) for code in range(0xE000, 0xF8FF)]


@dataclass
class Tokenizer:
    """A Hugging Face `tokenizers` object with what it does not say itself.

    `token_bytes[i]` are the bytes token i stands for; special tokens stand for none. `add_bos` holds for
    plain prompts; chat templates write their own.
    """

    inner: tokenizers.Tokenizer
    token_bytes: Sequence[bytes]
    special: Mapping[str, int]
    bos: int | None = None
    eos: frozenset[int] = frozenset()
    add_bos: bool = False
    strip_first_space: bool = False
    chat_template: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        texts = sorted(self.special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: no text of n bytes has fewer than n / longest_token tokens."""
        return max(map(len, self.token_bytes), default=1) or 1

    def encode(self, text: str, *, add_bos: bool | None = None, special: bool = False) -> list[int]:
        """Token ids. Text that looks like a special token stays text unless `special` is set."""
        bos = self.add_bos if add_bos is None else add_bos
        start = [self.bos] if bos and self.bos is not None else []
        return start + self._encode(text, special)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; special ones give none."""
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.add, tokens)) + detokenizer.finish()

    def detokenizer(self, shown: Iterable[int] = ()) -> Detokenizer:
        """A fresh incremental decoder. Special tokens are text only if they are `shown`."""
        wanted = set(shown)
        names = {token: text.encode() for text, token in self.special.items() if token in wanted} if wanted else {}
        return Detokenizer(self.token_bytes, self.strip_first_space, names)

    def encode_chat(self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation. Only the template can write special tokens, neither messages nor `variables`."""
        mark = self._unused_mark((messages, variables))
        text = template.render(self._defused(messages, mark), **{**self.names, **self._defused(variables, mark)})
        if mark not in text:
            return self._encode(text, True)
        ids: list[int] = []
        at = 0
        for match in self._special_pattern.finditer(text) if self._special_pattern else ():
            ids += self._encode(text[at : match.start()].replace(mark, ""), False)
            ids.append(self.special[match[0]])
            at = match.end()
        return ids + self._encode(text[at:].replace(mark, ""), False)

    def _encode(self, text: str, special: bool) -> list[int]:
        if not text:
            return []
        self.inner.encode_special_tokens = not special
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def _unused_mark(self, said: Any) -> str:
        """A private-use character that occurs nowhere in what was said."""
        text = repr(said)
        while (mark := secrets.choice(_PRIVATE)) in text:
            pass
        return mark

    def _defused(self, value: Any, mark: str) -> Any:
        """The messages with a mark inside everything that reads like a special token."""
        if isinstance(value, str):
            pattern = self._special_pattern
            return pattern.sub(lambda m: m[0][:1] + mark + m[0][1:], value) if pattern else value
        if isinstance(value, Mapping):
            return {self._defused(key, mark): self._defused(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._defused(item, mark) for item in value]
        return value


def byte_alphabet() -> dict[str, int]:
    """The 256 printable characters that byte-level BPE writes bytes with (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return characters | {chr(256 + index): byte for index, byte in enumerate(others)}
