"""Grammars: what an answer may say, kept to while it is drawn: JSON schemas, regular expressions, Lark grammars.

A grammar is llguidance's text form (`text/grammars.py` makes it). Its tokens are found from the tokens' bytes, so that
every tokenizer will do. Masks only ever look at tokens that are known: an answer under a grammar is the same alone
and in company, with drafts and without, and after it gave way.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from slipstream.engine.request import Whose
from slipstream.errors import UsageError
from slipstream.program import Draft
from slipstream.program.draft import ROOT
from slipstream.program.sampling import Mask
from slipstream.text import Tokenizer
from slipstream.text.grammars import goes_back, limits, matcher_of, problem

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64
"""Grammars that stay compiled, the latest ones."""
NOBODYS: Whose = ("", "")


class _Vocabulary:
    """The tokenizer as llguidance takes it."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        names = {token: text.encode() for text, token in tokenizer.special.items()}
        self.tokens = [data or names.get(token, b"") for token, data in enumerate(tokenizer.token_bytes)]
        self.special_token_ids = sorted(names)
        self.eos_token_id = min(tokenizer.eos, default=0)
        self.bos_token_id = tokenizer.bos

    def __call__(self, text: str | bytes) -> list[int]:
        known = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(known, add_bos=False)


class Grammars:
    """Compiles grammars for one vocabulary; may be used from several threads.

    What was compiled for one is not known to others: nobody learns from timing whether others asked for the same.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int):
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._known: OrderedDict[tuple[Whose, str], LLMatcher] = OrderedDict()
        self._one_way: set[tuple[Whose, str]] = set()
        self._lock = threading.Lock()
        self._inner: LLTokenizer | None = None

    def knows(self, grammar: str, whose: Whose = NOBODYS) -> bool:
        """Whether a grammar is compiled."""
        return (whose, grammar) in self._known

    def learn(self, grammar: str, whose: Whose = NOBODYS) -> LLMatcher:
        """Compile a grammar, unless it is known. Raises UsageError for one that cannot be compiled."""
        with self._lock:
            if (known := self._known.get((whose, grammar))) is not None:
                self._known.move_to_end((whose, grammar))
                return known
            self._inner = self._inner or self._tokens()
        matcher = matcher_of(self._inner, grammar, limits())
        _try(matcher.deep_copy())
        back = goes_back(matcher)
        with self._lock:
            self._known[whose, grammar] = matcher
            if not back:
                self._one_way.add((whose, grammar))
            if len(self._known) > KEPT:
                self._one_way.discard(self._known.popitem(last=False)[0])
        return matcher

    def constraint(self, grammar: str, whose: Whose = NOBODYS) -> GrammarConstraint:
        """A fresh state of a grammar. Raises UsageError for one that cannot be compiled."""
        matcher = self.learn(grammar, whose).deep_copy()
        return GrammarConstraint(matcher, self._vocabulary, (whose, grammar) in self._one_way)

    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        eos = sorted(self._tokenizer.eos) or [0]
        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer)), self._vocabulary, eos)


class GrammarConstraint:
    """Where one answer stands in its grammar.

    Text that must follow is split into tokens once, where it begins, and each of them is the only one that may follow
    in its place: with drafts and without, an answer is split alike.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, one_way: bool = False):
        """A grammar that is `one_way` cannot take back what it was told."""
        self._matcher, self._words, self.draftable = matcher, -(-vocabulary // 32), not one_way
        self._state = _UNKNOWN
        self._before: list[_State] = []  # states before each token that is only supposed

    @property
    def over(self) -> bool:
        """Whether nothing but the end can follow."""
        return bool(self._matcher.is_stopped())

    @property
    def failed(self) -> bool:
        """Whether the grammar became too complex, or a token came that it forbids."""
        return bool(self._matcher.is_error())

    def accept(self, token: int) -> None:
        """A token was said. One that the grammar forbids ends it."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._state = self._state.after(token)

    def suppose(self, token: int) -> None:
        """A token that may follow did, until it is taken back."""
        self._before.append(self._state)
        self.accept(token)

    def take_back(self, count: int | None = None) -> None:
        """Some supposed tokens, the last ones, or all, were not said."""
        count = len(self._before) if count is None else count
        if count:
            self._matcher.rollback(count)
            self._state = self._before[-count]
            del self._before[-count:]

    def mask(self) -> Mask:
        """The tokens that may follow."""
        forced = self._known().forced
        if not forced:
            return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        mask = np.zeros(self._words, np.uint32)
        mask[forced[0] // 32] = 1 << forced[0] % 32
        return mask

    def instead(self, token: int) -> Mask | None:
        """The tokens that may follow instead of this one; None if it may follow."""
        state = self._known()
        if state.free and self._matcher.validate_tokens([token]):
            return None
        mask = self.mask()
        return None if _allows(mask, token) else mask

    def masks(self, draft: Draft) -> list[Mask | None]:
        """The tokens that may follow what was said, and each token of a draft; None after one that may not."""
        found: list[Mask | None] = [self.mask()]
        path: list[int] = []  # nodes whose tokens are supposed
        for node, token in enumerate(draft.tokens):
            mask = found[draft.parents[node] + 1]
            if mask is None or not _allows(mask, token):
                found.append(None)
                continue
            before = _ancestors(draft, node)
            same = next((at for at, (a, b) in enumerate(zip(path, before, strict=False)) if a != b), len(before))
            same = min(same, len(path))
            self.take_back(len(path) - same)
            for ancestor in before[same:]:
                self.suppose(draft.tokens[ancestor])
            path = before
            if self._matcher.is_stopped():
                found.append(None)
                continue
            self.suppose(token)
            path = [*before, node]
            found.append(self.mask())
        self.take_back()
        return found

    def forced(self, most: int) -> Sequence[int]:
        """Up to `most` tokens of text that must follow."""
        return self._known().forced[:most]

    def _known(self) -> _State:
        if self._state is _UNKNOWN:
            matcher = self._matcher
            if matcher.is_stopped():
                self._state = _State((), free=False)
            elif matcher.compute_ff_bytes():
                self._state = _State(tuple(matcher.compute_ff_tokens()), free=False)
            else:
                self._state = _State((), free=True)
        return self._state


class _State(NamedTuple):
    """Tokens that must follow. A place is `free` if not even a token's first letters are given there."""

    forced: tuple[int, ...]
    free: bool

    def after(self, token: int) -> _State:
        """What is known one token later."""
        return _State(self.forced[1:], free=False) if self.forced[:1] == (token,) and self.forced[1:] else _UNKNOWN


_UNKNOWN = _State((), free=False)


def _allows(mask: Mask, token: int) -> bool:
    return bool(int(mask[token // 32]) >> token % 32 & 1)


def _try(matcher: LLMatcher) -> None:
    """Raise UsageError unless something can be said, and what must follow it after it was."""
    matcher.compute_bitmask()
    if not matcher.is_error() and not matcher.is_stopped():
        matcher.consume_tokens(matcher.compute_ff_tokens())
    if matcher.is_error():
        message = matcher.get_error()
        endless = any(sign in message for sign in ("NoExtensionBias", "Too many items"))
        raise UsageError("the grammar needs itself again and again: no text ends" if endless else problem(message))


def _ancestors(draft: Draft, node: int) -> list[int]:
    """The nodes before one, from the first on."""
    found: list[int] = []
    while (node := draft.parents[node]) != ROOT:
        found.append(node)
    return found[::-1]
