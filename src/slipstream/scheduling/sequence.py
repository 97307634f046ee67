"""Sequence: one choice of a request as the scheduler sees it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from slipstream.kvcache import Node
from slipstream.program import BLOCK_SLOTS, Draft, Namespace, sampled
from slipstream.program.sampling import Draw, SamplingParams


@dataclass(eq=False)
class Sequence:
    """Tokens so far, how many of them are in the cache, and the blocks they lie in. Equal only to itself.

    The one rule: computed tokens catch up with tokens. A prompt chunk, a decode and a recomputation
    after preemption are the same thing. Steps that are under way count as computed; of the tokens they draw
    `unknown` are not known yet, and the last of those is draw `draw_index` of its step.
    `tenant` is whose request it is; a lower `priority` goes first; `limit` is how many tokens it ends at;
    `cached` tokens of the prompt came from the prefix cache, in which `node` is where the sequence stands.
    A sequence that was moved out of the cache has its `computed` tokens in the spare blocks `saved`.
    Of the positions that are computed a neural drafter has state for the first `drafted`. Traffic with one `tag` is
    expected to be drafted alike. A sequence that is `alone` has nothing to do with the prefix cache.
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
        return self.params.has_penalties

    @property
    def draws_alike(self) -> bool:
        """Whether all tokens to come are drawn like the next one, but for their position."""
        return not self.params.has_penalties and self.generated + self.unknown >= self.params.min_tokens

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

    def draw(self) -> Draw:
        """How the token after the last one is drawn."""
        return Draw(self.params, self.seed, self.choice, self.length, adjust=self._adjust())

    def draw_after(self, path: list[int]) -> Draw:
        """How the token after the last one and then `path` is drawn, should those come to be its tokens."""
        return Draw(self.params, self.seed, self.choice, self.length + len(path), adjust=self._adjust(path))

    def draws(self, draft: Draft) -> list[Draw]:
        """How the token after the last one, and after each draft token, is drawn."""
        if self.draws_alike and not self._always_adjusts:
            return [
                Draw(self.params, self.seed, self.choice, self.length + depth)
                for depth in (0, *(depth + 1 for depth in draft.depths))
            ]
        return [self.draw(), *(self.draw_after(draft.path(index)) for index in range(len(draft)))]

    @property
    def _always_adjusts(self) -> bool:
        return bool(self.params.logit_bias or self.params.banned_tokens)

    def _adjust(self, path: SequenceOf[int] = ()) -> list[tuple[int, float, float]]:
        """Logits to be changed for the token after the last one and `path`."""
        p = self.params
        early = self.generated + self.unknown + len(path) < p.min_tokens
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
