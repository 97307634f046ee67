"""Grammars: what an answer may say, kept to while it is drawn: JSON schemas, regular expressions, Lark grammars.

A grammar is llguidance's text form (`text/grammars.py` makes it). Its tokens are found from the tokens' bytes, so that
every tokenizer will do. Masks only ever look at tokens that are known: an answer under a grammar is the same alone
and in company, with drafts and without, and after it gave way.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from slipstream.program import Draft
from slipstream.program.draft import ROOT
from slipstream.program.sampling import Mask
from slipstream.text import Tokenizer
from slipstream.text.grammars import goes_back, limits, matcher_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64
"""Grammars that stay compiled, the latest ones."""


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
    """Compiles grammars for one vocabulary; may be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int):
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()
        self._one_way: set[str] = set()
        self._lock = threading.Lock()
        self._inner: LLTokenizer | None = None

    def knows(self, grammar: str) -> bool:
        """Whether a grammar is compiled."""
        return grammar in self._known

    def learn(self, grammar: str) -> LLMatcher:
        """Compile a grammar, unless it is known. Raises UsageError for one that cannot be compiled."""
        with self._lock:
            if (known := self._known.get(grammar)) is not None:
                self._known.move_to_end(grammar)
                return known
            self._inner = self._inner or self._tokens()
        matcher = matcher_of(self._inner, grammar, limits())
        back = goes_back(matcher)
        with self._lock:
            self._known[grammar] = matcher
            if not back:
                self._one_way.add(grammar)
            if len(self._known) > KEPT:
                self._one_way.discard(self._known.popitem(last=False)[0])
        return matcher

    def constraint(self, grammar: str) -> GrammarConstraint:
        """A fresh state of a grammar. Raises UsageError for one that cannot be compiled."""
        return GrammarConstraint(self.learn(grammar).deep_copy(), grammar in self._one_way)

    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        eos = sorted(self._tokenizer.eos) or [0]
        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer)), self._vocabulary, eos)


class GrammarConstraint:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher, one_way: bool = False):
        """A grammar that is `one_way` cannot take back what it was told."""
        self._matcher, self.draftable = matcher, not one_way

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

    def mask(self) -> Mask:
        """The tokens that may follow."""
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)

    def masks(self, draft: Draft) -> list[Mask | None]:
        """The tokens that may follow what was said, and each token of a draft; None after one that may not."""
        found: list[Mask | None] = [self.mask()]
        path: list[int] = []  # nodes whose tokens have been consumed
        for node in range(len(draft)):
            before = _ancestors(draft, node)
            if any(found[ancestor + 1] is None for ancestor in before):
                found.append(None)
                continue
            same = next((at for at, (a, b) in enumerate(zip(path, before, strict=False)) if a != b), len(before))
            same = min(same, len(path))
            self._go_back(len(path) - same)
            for ancestor in before[same:]:
                self._matcher.consume_token(draft.tokens[ancestor])
            path = before
            if self._matcher.is_stopped() or self._matcher.validate_tokens([draft.tokens[node]]) < 1:
                found.append(None)
                continue
            self._matcher.consume_token(draft.tokens[node])
            path = [*before, node]
            found.append(self.mask())
        self._go_back(len(path))
        return found

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens of text that must follow."""
        return [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()[:most]

    def _go_back(self, tokens: int) -> None:
        if tokens:
            self._matcher.rollback(tokens)


def _ancestors(draft: Draft, node: int) -> list[int]:
    """The nodes before one, from the first on."""
    found: list[int] = []
    while (node := draft.parents[node]) != ROOT:
        found.append(node)
    return found[::-1]
