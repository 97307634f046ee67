"""Sequence: one choice of a request as the scheduler sees it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.kvcache import Node
from slipstream.program import BLOCK_SLOTS, Draft, Namespace, sampled
from slipstream.program.sampling import Draw, Mask, SamplingParams, both


class Constraint(Protocol):
    """What a sequence may say, as far as that depends on what it has said."""

    @property
    def over(self) -> bool:
        """Whether it has said all that it may."""

    @property
    def failed(self) -> bool:
        """Whether it cannot be told any more what it may say."""

    @property
    def draftable(self) -> bool:
        """Whether it can be asked about tokens that may not come to be said."""

    def accept(self, token: int) -> None:
        """It has said a token."""

    def mask(self) -> Mask:
        """The tokens that may follow."""

    def instead(self, token: int) -> Mask | None:
        """The tokens that may follow instead of this one; None if it may follow."""

    def suppose(self, token: int) -> None:
        """A token that may follow did, until `take_back`."""

    def take_back(self) -> None:
        """Nothing was supposed."""

    def masks(self, draft: Draft) -> SequenceOf[Mask | None]:
        """The tokens that may follow what was said, and each token of a draft; None after one that may not follow."""

    def forced(self, most: int) -> SequenceOf[int]:
        """Up to `most` tokens of text that must follow."""


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens so far, how many of them are in the cache, and the blocks they lie in. Equal only to itself.

    The one rule: computed tokens catch up with tokens. A prompt chunk, a decode and a recomputation
    after preemption are the same thing. Steps that are under way count as computed; of the tokens they draw
    `unknown` are not known yet, and the last of those is draw `draw_index` of its step.
    `tenant` is whose request it is; a lower `priority` goes first; `limit` is how many tokens it ends at;
    `cached` tokens of the prompt came from the prefix cache, in which `node` is where the sequence stands.
    A sequence that was moved out of the cache has its `computed` tokens in the spare blocks `saved`.
    Of the positions that are computed a neural drafter has state for the first `drafted`. Traffic with one `tag` is
    expected to be drafted alike. A sequence that is `alone` has nothing to do with the prefix
    cache. `names` are those of its first blocks on the cache's shelf. What it may say is up to its `constraint`.
    """

    request: int
    choice: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int
    eos: frozenset[int]
    limit: int
    namespace: Namespace
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    unknown: int = 0
    draw_index: int = 0
    saved: list[int] = field(default_factory=list)
    ended: bool = False
    waits_for: Sequence | None = None
    counts: Counter[int] = field(default_factory=Counter)
    tenant: str = ""
    priority: int = 0
    arrived: float = 0.0
    deadline: float = math.inf
    cached: int = 0
    preemptions: int = 0
    node: Node | None = None
    drafted: int = 0
    tag: str = ""
    alone: bool = False
    names: list[str] = field(default_factory=list)
    constraint: Constraint | None = None

    @property
    def generated(self) -> int:
        """Tokens drawn so far, and known."""
        return len(self.tokens) - self.prompt_length

    @property
    def length(self) -> int:
        """Tokens, the unknown ones included."""
        return len(self.tokens) + self.unknown

    @property
    def missing(self) -> int:
        """Tokens not yet computed."""
        return self.length - self.computed

    @property
    def may_go_on(self) -> bool:
        """Whether there will be another token once those under way are known."""
        return not self.unknown or self.length < self.limit

    @property
    def needs_history(self) -> bool:
        """Whether the next token cannot be drawn before the last one is known."""
        return self.params.has_penalties or self.constraint is not None

    @property
    def redraws(self) -> bool:
        """Whether a token that is drawn without the constraint's mask, and may follow, is the one drawn with it: noise
        is a token's own, and none is left out for what others there are.
        """
        return self.constraint is not None and not self.params.filters

    @property
    def repeats(self) -> bool:
        """Whether the next step differs from the last one in token, position and mask only, once its token is known."""
        p = self.params
        if p.has_penalties or (p.min_tokens and self.generated + self.unknown < p.min_tokens):
            return False
        return self.constraint is None or not p.allowed_tokens

    @property
    def draws_plainly(self) -> bool:
        """Whether all tokens to come are drawn like the next one, but for position and constraint, and none of them has
        its logits adjusted.
        """
        p = self.params
        return not (p.adjusts or (p.min_tokens and self.generated + self.unknown < p.min_tokens))

    def token(self, position: int) -> int:
        """The token at a position, or what stands for one that is unknown."""
        return self.tokens[position] if position < len(self.tokens) else sampled(self.draw_index)

    def slot(self, position: int) -> int:
        """Cache slot of a position."""
        return self.blocks[position // BLOCK_SLOTS] * BLOCK_SLOTS + position % BLOCK_SLOTS

    def append(self, token: int) -> None:
        """Add a drawn token."""
        self.tokens.append(token)
        if self.params.has_penalties:
            self.counts[token] += 1
        if self.constraint is not None:
            self.constraint.accept(token)

    def draw(self, *, masked: bool = True) -> Draw:
        """How the token after the last one is drawn, by its constraint's mask or without it."""
        mask = self.constraint.mask() if masked and self.constraint is not None else None
        return self.draw_after([], mask)

    def draw_after(self, path: list[int], mask: Mask | None = None) -> Draw:
        """How the token after the last one and then `path` is drawn, should those come to be its tokens."""
        at = self.length + len(path)
        if (allowed := self.params.allowed_mask) is not None:
            mask = allowed if mask is None else both(allowed, mask)
        return Draw(self.params, self.seed, self.choice, at, adjust=self._adjust(path), mask=mask)

    def draws(self, draft: Draft, *, masked: bool = True) -> list[Draw]:
        """How the token after the last one, and after each draft token, is drawn."""
        masked = masked and self.constraint is not None
        if self.draws_plainly and not masked:
            return [Draw(self.params, self.seed, self.choice, at) for at in self.draw_positions(draft)]
        paths = [[], *(draft.path(index) for index in range(len(draft)))]
        masks = self.constraint.masks(draft) if self.constraint is not None and masked else [None] * len(paths)
        return [self.draw_after(path, mask) for path, mask in zip(paths, masks, strict=True)]

    def draw_positions(self, draft: Draft) -> list[int]:
        """Positions of the tokens that those draws draw."""
        length = self.length
        return [length, *(length + 1 + depth for depth in draft.depths)]

    def _adjust(self, path: SequenceOf[int] = ()) -> list[tuple[int, float, float]]:
        """Logits to be changed for the token after the last one and `path`."""
        p = self.params
        over = self.constraint is not None and self.constraint.over
        early = self.generated + self.unknown + len(path) < p.min_tokens and not over
        if not (p.has_penalties or p.logit_bias or p.banned_tokens or early):
            return []
        multiply: dict[int, float] = {}
        add: dict[int, float] = {}
        if p.repetition_penalty != 1.0:
            multiply = dict.fromkeys((*self.tokens, *path), p.repetition_penalty)
        counts = self.counts + Counter(path) if path and p.has_penalties else self.counts
        for token, count in counts.items() if p.has_penalties else ():
            add[token] = -(p.presence_penalty + p.frequency_penalty * count)
        for token, bias in p.logit_bias.items():
            add[token] = add.get(token, 0.0) + bias
        for token in p.banned_tokens:
            add[token] = -math.inf
        if early:
            for token in self.eos.union(p.stop_token_ids):
                add[token] = -math.inf
        return [
            (token, multiply.get(token, 1.0), add.get(token, 0.0)) for token in sorted(multiply.keys() | add.keys())
        ]
