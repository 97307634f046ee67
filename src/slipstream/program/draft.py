"""Draft: tokens that a drafter proposes after the last known one, as a chain or a tree, and which of them hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

ROOT = -1
"""The parent of a draft's first tokens: the last known token."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """From which distribution q a draft token was drawn: `tokens` with their `weights`, which add up to 1.

    Without `tokens` it is dense: `weights` is [vocabulary]. A one-hot draft has no Proposal.
    """

    weights: npt.NDArray[np.float32]
    tokens: npt.NDArray[np.int32] | None = None

    def possible(self, vocabulary: int) -> bool:
        """Whether it is a distribution over so many tokens; what damaged weights make of it is none."""
        if self.tokens is None:
            fits = self.weights.shape == (vocabulary,)
        else:
            fits = self.tokens.shape == self.weights.shape and self.tokens.size > 0
            fits = fits and 0 <= self.tokens.min() <= self.tokens.max() < vocabulary
        return bool(fits and self.weights.min() >= 0 and abs(float(self.weights.sum()) - 1.0) < 0.01)

    def dense(self, vocabulary: int) -> npt.NDArray[np.float64]:
        """q over the whole vocabulary, float64 [vocabulary]."""
        if self.tokens is None:
            return self.weights.astype(np.float64)
        whole = np.zeros(vocabulary)
        whole[self.tokens] = self.weights
        return whole


@dataclass(frozen=True)
class Draft:
    """`tokens[i]` comes after `tokens[parents[i]]`, or after the last known token where that is ROOT.

    Parents come before their children. `classes[i]` says how sure the drafter was, in its own classes of confidence.
    `proposals[i]` is what a token was drawn from; without them each is the only one that was proposed (one-hot).
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    classes: tuple[int, ...]
    drafter: str
    proposals: tuple[Proposal, ...] | None = None

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        classes: Sequence[int],
        drafter: str,
        proposals: tuple[Proposal, ...] | None = None,
    ) -> Draft:
        """A draft without branches."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(classes), drafter, proposals)

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, count: int) -> Draft:
        """The first `count` tokens."""
        if count >= len(self):
            return self
        proposals = self.proposals[:count] if self.proposals is not None else None
        return Draft(self.tokens[:count], self.parents[:count], self.classes[:count], self.drafter, proposals)

    @cached_property
    def is_chain(self) -> bool:
        """Whether it has no branches."""
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How many draft tokens come before each."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def path(self, index: int) -> list[int]:
        """The draft tokens from the first to `index`."""
        tokens: list[int] = []
        while index != ROOT:
            tokens.append(self.tokens[index])
            index = self.parents[index]
        return tokens[::-1]

    def child(self, index: int, token: int) -> int | None:
        """The draft token after another (or ROOT) that is `token`, if there is one."""
        after = range(index + 1, len(self))
        return next((at for at in after if self.parents[at] == index and self.tokens[at] == token), None)

    def accepted(self, drawn: Sequence[int]) -> list[int]:
        """Which draft tokens hold, given what the target drew after the last known token and after each of them.

        A token holds if it is what the target itself draws in its place: the answer is that of plain decoding.
        """
        held: list[int] = []
        at = ROOT
        for index, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if parent == at and token == drawn[at + 1]:
                held.append(index)
                at = index
        return held
