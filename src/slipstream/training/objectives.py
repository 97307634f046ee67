"""Objectives: what a drafter in training is asked, and how near it is to what it will be asked when it drafts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.training.batches import Batch
from slipstream.training.modules.eagle3 import Eagle3
from slipstream.training.target import TargetParts

UNSEEN = -1
DENSITY = 0.3
"""Chains that are begun among the places where one could be."""
SEEDS = 1_000_003


@dataclass
class Agreement:
    """How drafts fare: acceptance by position of chains begun anywhere, and answers walked as they are made."""

    tries: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0

    def add(self, right: Tensor, valid: Tensor) -> None:
        """`right` and `valid` [B, Q, K]: of the chain begun at each place of an answer, in order, each draft.

        A place whose first draft is not valid is none.
        """
        self._grow(right.shape[2])
        alive = valid[..., 0]
        accepted = torch.zeros(alive.shape, dtype=torch.long)
        for position in range(right.shape[2]):
            alive = alive & valid[..., position]
            self.tries[position] += int(alive.sum())
            alive = alive & right[..., position]
            self.hits[position] += int(alive.sum())
            accepted += alive
        for places, counts in zip(valid[..., 0].sum(1).tolist(), accepted.tolist(), strict=True):
            at = 0
            while at < places:
                at += counts[at] + 1
                self.steps += 1
            self.tokens += places

    def _grow(self, positions: int) -> None:
        for column in (self.tries, self.hits):
            column += [0] * (positions - len(column))

    def merge(self, other: Agreement) -> None:
        """Add another's."""
        self._grow(len(other.tries))
        for mine, theirs in ((self.tries, other.tries), (self.hits, other.hits)):
            for position, count in enumerate(theirs):
                mine[position] += count
        self.tokens, self.steps = self.tokens + other.tokens, self.steps + other.steps

    @property
    def tau(self) -> float:
        """Mean tokens of a verification, the bonus token included."""
        return self.tokens / self.steps if self.steps else 1.0

    def conditional(self) -> list[float]:
        """Acceptance by position, given that all before it were accepted."""
        return [hits / tries for hits, tries in zip(self.hits, self.tries, strict=True) if tries]


class Objective(Protocol):
    """A drafter's module with what it is asked."""

    @property
    def module(self) -> nn.Module:
        """What is trained."""

    def loss(self, batch: Batch, step: int) -> tuple[Tensor, int]:
        """(sum over what was asked, how much that is). What is asked at random depends on the `step`'s number."""

    def agreement(self, batch: Batch, draft_len: int) -> Agreement:
        """Of greedy chains; without gradients."""


class Eagle3Objective:
    """Soft cross-entropy with the target's distribution over the draft vocabulary, in each step of the unrolled test.

    All of an answer's rows are asked in step 0; later steps follow chains from some of them. Steps count less the later
    they are, and where what the target says next is none of the tokens that the drafter knows, nothing is asked
    (Li et al., arXiv 2503.01840).
    """

    def __init__(self, module: Eagle3, target: TargetParts, tokens: Tensor, unroll: int, decay: float, seed: int):
        """`tokens` are the draft vocabulary, ascending."""
        self.module, self._target, self._tokens, self._seed = module, target, tokens, seed
        self._unroll, self._weights = unroll, [decay**step for step in range(unroll)]
        self._place = torch.full((len(target.embedding),), UNSEEN)
        self._place[tokens] = torch.arange(len(tokens))

    def _unrolled(self, batch: Batch, rows: Tensor, anchors: Tensor, steps: int) -> tuple[Tensor, list[Tensor]]:
        embedded = F.embedding(batch.tokens[:, 1:-1], self._target.embedding)
        return self.module.unroll(batch.taps, embedded, rows, anchors, steps)

    def loss(self, batch: Batch, step: int) -> tuple[Tensor, int]:
        """(weighted sum over rows and steps, rows of the first step)."""
        rows, learned = places(batch.learn)
        anchors, counts = some_of(learned, batch.tokens, DENSITY, self._seed * SEEDS + step)
        known = batch.learn & (self._place[batch.tokens[:, 2:]] != UNSEEN)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first, later = self._unrolled(batch, rows, anchors, self._unroll)
            taught = self._taught(batch)
            total = self._asked(first, rows, learned, known, taught)
            begun, alive = rows.gather(1, anchors), counts & learned.gather(1, anchors)
            for depth, x in enumerate(later, 1):
                at = (begun + depth).clamp(max=batch.learn.shape[1] - 1)
                alive = alive & batch.learn.gather(1, at) & (begun + depth < batch.learn.shape[1])
                total = total + self._weights[depth] / DENSITY * self._asked(x, at, alive, known, taught)
        return total, int(learned.sum())

    @torch.no_grad()
    def _taught(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(the target's distributions over the draft vocabulary, for each row that is learned its place there)."""
        place = torch.zeros(batch.learn.shape, dtype=torch.long)
        place[batch.learn] = torch.arange(int(batch.learn.sum()))
        return self._target.logits(batch.ahead[batch.learn], self._tokens).softmax(-1), place

    def _asked(self, x: Tensor, rows: Tensor, wanted: Tensor, known: Tensor, taught: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy summed over those of the rows [B, N] that are `wanted` and known."""
        asked = wanted & known.gather(1, rows)
        logits = self.module.logits(x[asked]).float()
        return -(taught[0][taught[1].gather(1, rows)[asked]] * logits.log_softmax(-1)).sum()

    @torch.no_grad()
    def agreement(self, batch: Batch, draft_len: int) -> Agreement:
        """Chains that begin at every row."""
        rows, learned = places(batch.learn)
        anchors = torch.arange(rows.shape[1]).expand(rows.shape)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first, later = self._unrolled(batch, rows, anchors, draft_len)
        right, valid, alive = [], [], learned
        for depth, x in enumerate([first, *later]):
            at = (rows + depth).clamp(max=batch.learn.shape[1] - 1)
            alive = alive & batch.learn.gather(1, at) & (rows + depth < batch.learn.shape[1])
            agrees = torch.zeros(rows.shape, dtype=torch.bool)
            said = batch.tokens[:, 2:].gather(1, at)[alive]
            agrees[alive] = self._tokens[self.module.logits(x[alive]).argmax(-1)] == said
            right.append(agrees)
            valid.append(alive)
        found = Agreement()
        found.add(torch.stack(right, -1), torch.stack(valid, -1))
        return found


def places(learn: Tensor) -> tuple[Tensor, Tensor]:
    """(rows [B, Q] that are learned, in order and padded, which of them count) of a mask [B, T]."""
    counts = learn.sum(1)
    most = max(1, int(counts.max()))
    order = torch.sort(learn.to(torch.int8), dim=1, descending=True, stable=True).indices[:, :most]
    return order, torch.arange(most) < counts[:, None]


def some_of(learned: Tensor, tokens: Tensor, density: float, seed: int) -> tuple[Tensor, Tensor]:
    """(places [B, A], which of them count): a share of those that are `learned` [B, Q], at random.

    What is chosen of an example depends on its `tokens` and the seed, not on the others beside it.
    """
    chance = torch.full(learned.shape, -1.0)
    for row, (mask, said) in enumerate(zip(learned, tokens, strict=True)):
        generator = torch.Generator().manual_seed((seed * SEEDS + int(said.sum())) % (1 << 63))
        chance[row, mask] = torch.rand(int(mask.sum()), generator=generator)
    most = max(1, math.ceil(density * int(learned.sum(1).max())))
    values, chosen = chance.topk(most, 1)
    wanted = torch.ceil(density * learned.sum(1, keepdim=True))
    return chosen, (values >= 0) & (torch.arange(most) < wanted)
