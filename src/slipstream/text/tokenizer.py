"""Tokenizer: text to token ids and back, whichever file the vocabulary came from."""

from __future__ import annotations

import bisect
import itertools
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import tokenizers

from slipstream.text.detokenizer import Detokenizer
from slipstream.text.sandbox import TemplateError

if TYPE_CHECKING:
    from slipstream.text.template import ChatTemplate

_PRIVATE = [chr(code) for code in range(0xE000, 0xF8FF)]


class Rendered(NamedTuple):
    """A conversation's text, and the mark that keeps what was said from being read as special tokens."""

    text: str
    mark: str


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
    def _texts(self) -> dict[int, str]:
        return {}

    @cached_property
    def _special_texts(self) -> list[str]:
        return sorted(filter(None, self.special))

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        texts = sorted(self._special_texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    @cached_property
    def _special_starts(self) -> tuple[frozenset[str], int]:
        """The characters that special tokens begin with, and the length of the longest one."""
        return frozenset(text[0] for text in self._special_texts), max(map(len, self._special_texts), default=0)

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
        return Detokenizer(self.token_bytes, self.strip_first_space, names, None if names else self._texts)

    def encode_chat(self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation. Only the template can write special tokens, neither messages nor `variables`."""
        return self.encode_rendered(self.render(template, messages, **variables))

    def render(self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Rendered:
        """The first half of it, which may take as long as templates may; any thread can do it."""
        mark = _unused_mark((messages, variables))
        values = {**self.names, **self._defused(variables, mark)}
        return Rendered(template.render(self._defused(messages, mark), **values), mark)

    def encode_rendered(self, rendered: Rendered) -> list[int]:
        """The second half of it."""
        text, mark = rendered
        if mark not in text:
            return self._encode(text, True)
        ids: list[int] = []
        at = 0
        for match in self._written(text, mark):
            ids += self._encode(text[at : match.start()].replace(mark, ""), False)
            ids.append(self.special[match[0]])
            at = match.end()
        return ids + self._encode(text[at:].replace(mark, ""), False)

    def _written(self, text: str, mark: str) -> Iterator[re.Match[str]]:
        """The special tokens in what a template wrote; one that a mark follows is of one character, and no token."""
        pattern, at = self._special_pattern, 0
        while pattern is not None and (match := pattern.search(text, at)):
            if text[match.end() : match.end() + 1] == mark:
                at = match.start() + 1
                if (shorter := pattern.match(text, match.start(), match.end() - 1)) is None:
                    continue
                match = shorter
            yield match
            at = match.end()

    def _encode(self, text: str, special: bool) -> list[int]:
        if not text:
            return []
        self.inner.encode_special_tokens = not special
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def _defused(self, value: Any, mark: str) -> Any:
        """The messages with a mark in everything that reads like a special token, or may be the beginning of one."""
        if isinstance(value, str):
            return self._marked(value, mark)
        if isinstance(value, Mapping):
            return {self._defused(key, mark): self._defused(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._defused(item, mark) for item in value]
        return value

    def _marked(self, text: str, mark: str) -> str:
        pattern = self._special_pattern
        if pattern is None:
            return text
        places = {end for end in (len(text), len(text.rstrip())) if self._may_begin(text[:end])}
        match = pattern.search(text)
        while match:  # they may overlap
            places.add(match.start() + 1)
            match = pattern.search(text, match.start() + 1)
        return mark.join(text[a:b] for a, b in itertools.pairwise((0, *sorted(places), len(text)))) if places else text

    def _may_begin(self, text: str) -> bool:
        """Whether a special token could begin at the end of a text: a template may put another text behind it."""
        first, longest = self._special_starts
        for size in range(1, min(len(text), longest) + 1):
            if text[-size] in first:
                end = text[-size:]
                place = bisect.bisect_left(self._special_texts, end)
                if place < len(self._special_texts) and self._special_texts[place].startswith(end):
                    return True
        return False


def _unused_mark(said: Any) -> str:
    """A private-use character that occurs nowhere in what was said. Raises TemplateError if all of them do."""
    used = set("".join(_texts(said)))
    while (mark := secrets.choice(_PRIVATE)) in used:
        if used.issuperset(_PRIVATE):
            raise TemplateError("chat template: the messages leave no private-use character")
    return mark


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def byte_alphabet() -> dict[str, int]:
    """The 256 printable characters that byte-level BPE writes bytes with (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return characters | {chr(256 + index): byte for index, byte in enumerate(others)}
