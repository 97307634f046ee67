"""Objectives: what a drafter in training is asked, and how near it is to what it will be asked when it drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.training.batches import Batch
from slipstream.training.modules.eagle3 import Eagle3
from slipstream.training.target import TargetParts

UNSEEN = -1


@dataclass
class Agreement:
    """Of chains begun at every place, how many tokens were right, given that all before them were."""

    begun: int = 0
    tries: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)

    def add(self, right: Tensor, valid: Tensor) -> None:
        """`right` and `valid` [chains, positions]."""
        alive = valid[:, 0].clone()
        self.begun += int(alive.sum())
        while len(self.tries) < right.shape[1]:
            self.tries.append(0)
            self.hits.append(0)
        for position in range(right.shape[1]):
            alive = alive & valid[:, position]
            self.tries[position] += int(alive.sum())
            alive = alive & right[:, position]
            self.hits[position] += int(alive.sum())

    def merge(self, other: Agreement) -> None:
        """Add another's."""
        count = max(len(self.tries), len(other.tries))
        for mine, theirs in ((self.tries, other.tries), (self.hits, other.hits)):
            mine[:] = [(mine[i] if i < len(mine) else 0) + (theirs[i] if i < len(theirs) else 0) for i in range(count)]
        self.begun += other.begun

    @property
    def tau(self) -> float:
        """Mean tokens of a verification that begins anywhere, the bonus token included."""
        return 1.0 + sum(self.hits) / self.begun if self.begun else 1.0

    def conditional(self) -> list[float]:
        """Acceptance by position, given that all before it were accepted."""
        return [hits / tries for hits, tries in zip(self.hits, self.tries, strict=True) if tries]


class Objective(Protocol):
    """A drafter's module with what it is asked."""

    module: nn.Module

    def loss(self, batch: Batch) -> tuple[Tensor, int]:
        """(sum over what was asked, how much that is)."""

    def agreement(self, batch: Batch, draft_len: int) -> Agreement:
        """Of greedy chains; without gradients."""


class Eagle3Objective:
    """Soft cross-entropy with the target's distribution over the draft vocabulary, in each step of the unrolled test.

    Steps count less the later they are; where the target's likeliest token is none that the drafter knows, nothing is
    asked (Li et al., arXiv 2503.01840).
    """

    def __init__(self, module: Eagle3, target: TargetParts, tokens: Tensor, unroll: int, decay: float):
        """`tokens` are the draft vocabulary, ascending."""
        self.module, self._target, self._tokens = module, target, tokens
        self._unroll, self._weights = unroll, [decay**step for step in range(unroll)]
        self._place = torch.full((len(target.embedding),), UNSEEN)
        self._place[tokens] = torch.arange(len(tokens))

    def _outs(self, batch: Batch, steps: int) -> list[Tensor]:
        embedded = F.embedding(batch.tokens[:, 1:-1], self._target.embedding)
        return self.module.unroll(batch.taps, embedded, steps)

    def loss(self, batch: Batch) -> tuple[Tensor, int]:
        """(weighted sum over rows and steps, rows of the first step)."""
        total = torch.zeros(())
        count = 0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                taught = self._target.logits(batch.ahead[batch.learn], self._tokens)
                asked = torch.zeros(batch.learn.shape, dtype=torch.long)
                asked[batch.learn] = torch.arange(len(taught))
                known = batch.learn.clone()
                known[batch.learn] = self._place[batch.tokens[:, 2:][batch.learn]] != UNSEEN
                taught = taught.softmax(-1)
            for step, (x, weight) in enumerate(zip(self._outs(batch, self._unroll), self._weights, strict=True)):
                rows = known & _begun(batch.learn, step)
                logits = self.module.logits(x[rows]).float()
                total = total - weight * (taught[asked[rows]] * logits.log_softmax(-1)).sum()
                count = count or int(rows.sum())
        return total, count

    @torch.no_grad()
    def agreement(self, batch: Batch, draft_len: int) -> Agreement:
        """Chains that begin at every row."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outs = self._outs(batch, draft_len)
            right = torch.stack([self._agrees(x, batch, step) for step, x in enumerate(outs)], -1)
        valid = torch.stack([_ahead(batch.learn, step) for step in range(draft_len)], -1)
        found = Agreement()
        found.add(right[batch.learn], valid[batch.learn])
        return found

    def _agrees(self, x: Tensor, batch: Batch, step: int) -> Tensor:
        """[B, T] at each chain's first row: whether its draft number `step` is what was said."""
        rows = batch.learn & _begun(batch.learn, step)
        right = torch.zeros(batch.learn.shape, dtype=torch.bool)
        said = self._tokens[self.module.logits(x[rows]).argmax(-1)]
        right[rows] = said == batch.tokens[:, 2:][rows]
        return F.pad(right, (0, step))[:, step:]


def _begun(learn: Tensor, step: int) -> Tensor:
    """Rows whose chain began `step` rows before at a row that is learned."""
    return learn if step == 0 else F.pad(learn, (step, 0))[:, :-step]


def _ahead(learn: Tensor, step: int) -> Tensor:
    """Rows for which the row `step` rows on is learned too."""
    return F.pad(learn, (0, step))[:, step:]
