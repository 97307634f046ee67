"""DSpark's objective: blocks at random anchors of answers, each slot to be as likely accepted as can be.

A slot is asked for the target's distribution (L1 distance, which is what acceptance depends on) and for what was said
(cross-entropy), later slots less; the confidence head for the chance of being accepted, 1 - ||p - q||₁ / 2. Weights are
the paper's (arXiv 2607.05147).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.training.batches import Batch
from slipstream.training.modules.dspark import DSpark, embedded_blocks
from slipstream.training.objectives import SEEDS, UNSEEN, Agreement, places, some_of
from slipstream.training.target import TargetParts

CROSS_ENTROPY, DISTANCE, CONFIDENCE = 0.1, 0.9, 1.0
GAMMA = 4.0
"""Slots by which the weight falls to 1/e."""
DENSITY, CHECKED = 0.34, 0.25
"""Anchors among the places that could be one; share of the held-out answers that are looked at, as blocks are dear."""


class DSparkObjective:
    """The drafter and what it is asked. `tokens` are the draft vocabulary, ascending."""

    def __init__(self, module: DSpark, target: TargetParts, tokens: Tensor, seed: int):
        self.module, self._target, self._tokens, self._seed = module, target, tokens, seed
        self._place = torch.full((len(target.embedding),), UNSEEN)
        self._place[tokens] = torch.arange(len(tokens))
        drafts = module.config.drafts
        self._weights = torch.exp(-torch.arange(drafts) / GAMMA)

    def _slots(self, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rows [B, A, K] of all slots, which of them are learned, tokens [B, A, K] before each)."""
        drafts, count = self.module.config.drafts, batch.learn.shape[1]
        slots = rows[..., None] + torch.arange(drafts)
        inside = slots < count
        slots = slots.clamp(max=count - 1)
        flat = slots.flatten(1)
        learned = batch.learn.gather(1, flat).view(slots.shape) & inside
        return slots, learned.cumprod(-1).bool(), batch.tokens.gather(1, flat + 1).view(slots.shape)

    def _hidden(self, batch: Batch, rows: Tensor) -> Tensor:
        c = self.module.config
        anchors = rows + 1
        blocks = embedded_blocks(self._target.embedding, batch.tokens.gather(1, anchors), c.mask_token, c.block)
        return self.module.hidden(batch.taps, blocks, anchors)[:, :, c.first_slot :]

    def loss(self, batch: Batch, step: int) -> tuple[Tensor, int]:
        """(weighted sum over slots, anchors)."""
        rows, counts = some_of(batch.learn, batch.tokens, DENSITY, self._seed * SEEDS + step)
        slots, learned, before = self._slots(batch, rows)
        asked = learned & counts[..., None]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self._hidden(batch, rows)[asked]
            with torch.no_grad():
                ahead = batch.ahead.gather(1, slots.flatten(1)[..., None].expand(-1, -1, batch.ahead.shape[2]))
                p = self._target.logits(ahead.view(*slots.shape, -1)[asked], self._tokens).softmax(-1)
            said = self._place[batch.tokens.gather(1, slots.flatten(1) + 2).view(slots.shape)[asked]]
            logits = self.module.logits(hidden, before[asked]).float()
            confidence = self.module.confidence(hidden, before[asked]).float()
        distance = (p - logits.softmax(-1)).abs().sum(-1)
        known = said != UNSEEN
        crossed = F.cross_entropy(logits, said.clamp(min=0), reduction="none") * known
        sure = F.binary_cross_entropy_with_logits(confidence, 1.0 - distance.detach() / 2.0, reduction="none")
        weights = self._weights.expand(slots.shape)[asked]
        total = (weights * (CROSS_ENTROPY * crossed + DISTANCE * distance + CONFIDENCE * sure)).sum()
        return total, int(counts.sum())

    @torch.no_grad()
    def agreement(self, batch: Batch, draft_len: int) -> Agreement:
        """Of blocks walked greedily from all places of some of the answers."""
        few = slice(0, max(1, round(CHECKED * len(batch.learn))))
        batch = Batch(batch.tokens[few], batch.taps[few], batch.ahead[few], batch.learn[few])
        rows, learned = places(batch.learn)
        slots, valid, before = self._slots(batch, rows)
        said = batch.tokens.gather(1, slots.flatten(1) + 2).view(slots.shape)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self._hidden(batch, rows)
            previous, right = before[..., 0], []
            for slot in range(min(draft_len, self.module.config.drafts)):
                previous = self._tokens[self.module.logits(hidden[:, :, slot], previous).argmax(-1)]
                right.append(previous == said[..., slot])
        found = Agreement()
        found.add(torch.stack(right, -1), valid[..., : len(right)] & learned[..., None])
        return found
