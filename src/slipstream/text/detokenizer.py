"""Tokens to text, one at a time: never half a character, never one lost; stop strings never leak."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from types import MappingProxyType


class Detokenizer:
    """Feeds token bytes through a UTF-8 decoder that keeps unfinished characters back.

    Bytes that can never become a character come out as U+FFFD. `strip_first_space` drops the space that
    SentencePiece puts before a text. `shown` is what stands for special tokens, which give no text otherwise.
    `texts` are those of tokens that are whole characters, as far as they are known; it learns more.
    """

    __slots__ = ("_bytes", "_count", "_decoder", "_shown", "_strip", "_texts", "_unfinished", "_whole")

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        strip_first_space: bool = False,
        shown: Mapping[int, bytes] = MappingProxyType({}),
        texts: dict[int, str] | None = None,
    ):
        self._texts = {} if texts is None else texts
        self._whole = not strip_first_space
        self._bytes, self._count, self._shown = token_bytes, len(token_bytes), shown
        self._unfinished = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_first_space

    def add(self, token: int) -> str:
        """Text that the token completes, perhaps none."""
        if self._whole and (text := self._texts.get(token)) is not None:
            return text
        raw = self._bytes[token] if 0 <= token < self._count else b""
        if not raw and self._shown:
            raw = self._shown.get(token, b"")
        if self._strip and raw:
            raw, self._strip = raw.removeprefix(b" "), False
        if not self._unfinished:
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                pass  # perhaps only half a character yet
            else:
                if self._whole:
                    self._texts[token] = text
                self._whole = not self._strip
                return text
        text = self._decoder.decode(raw)
        self._unfinished = bool(self._decoder.getstate()[0])
        self._whole = not (self._unfinished or self._strip)
        return text

    def finish(self) -> str:
        """What is left: an unfinished character comes out as U+FFFD."""
        return self._decoder.decode(b"", True)


class StopStrings:
    """Holds back text that may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]):
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string that was hit or None)."""
        text = self._held + text
        hits = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            at, stop = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[:at], stop
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def finish(self) -> str:
        """Text still held back; no stop string can come of it now."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
