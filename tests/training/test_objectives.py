"""What is asked in training, against the same asked one row at a time; and what tau is of chains that are known."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.training import dspark_objective, objectives
from slipstream.training.batches import Batch, Item
from slipstream.training.dataset import Example
from slipstream.training.kinds import DECAY, UNROLL, DSparkKind, Eagle3Kind, Wanted
from slipstream.training.modules.dspark import embedded_blocks
from slipstream.training.objectives import Agreement, some_of
from slipstream.training.target import TargetParts
from slipstream.weights.open import open_checkpoint

TOKENS = np.arange(3, 259, 2, dtype=np.int32)
"""Half of what is said is outside the draft vocabulary."""
STEP = 7


@pytest.fixture(scope="module")
def target(tiny_gguf: Path) -> TargetParts:
    return TargetParts.of(open_checkpoint(tiny_gguf))


@pytest.fixture(autouse=True)
def _in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())


def noisy(kind: Any) -> Any:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in kind.module.parameters():
            spread = 1.0 / parameter.shape[-1] ** 0.5 if parameter.ndim == 2 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    return kind


def batch_for(kind: Any, target: TargetParts) -> Batch:
    """Two examples of unlike length; the second has two answers."""
    rng, width = np.random.default_rng(3), len(kind.taps) * target.config.hidden
    examples = [Example(tuple(rng.integers(0, 259, 24).tolist()), ((9, 24),)),
                Example(tuple(rng.integers(0, 259, 33).tolist()), ((5, 14), (20, 30)))]  # fmt: skip
    states = [rng.standard_normal((len(e.tokens), width + target.config.hidden)).astype(np.float32) for e in examples]
    batch = Batch.of([Item(e, torch.from_numpy(s)) for e, s in zip(examples, states, strict=True)], width)
    return Batch(batch.tokens, batch.taps.float(), batch.ahead.float(), batch.learn)


def taught(target: TargetParts, ahead: torch.Tensor) -> torch.Tensor:
    """The target's distribution over the draft vocabulary after a last hidden state."""
    tokens = torch.from_numpy(TOKENS.astype(np.int64))
    return target.logits(ahead[None], tokens)[0].float().softmax(-1)


def place_of(token: int) -> int | None:
    found = np.flatnonzero(token == TOKENS)
    return int(found[0]) if len(found) else None


def test_eagle3_one_chain_at_a_time(target: TargetParts) -> None:
    kind = noisy(Eagle3Kind(Wanted(target, 1, TOKENS, (), seed=4)))
    batch = batch_for(kind, target)
    total, asked = kind.objective.loss(batch, STEP)
    rows, learned = objectives.places(batch.learn)
    anchors, counts = some_of(learned, batch.tokens, objectives.DENSITY, 4 * objectives.SEEDS + STEP)
    expected = 0.0
    for b in range(2):
        begun = {int(rows[b, a]) for a, counted in zip(anchors[b], counts[b], strict=True) if counted}
        assert 0 < len(begun) < int(batch.learn[b].sum())
        for row in torch.nonzero(batch.learn[b])[:, 0].tolist():
            embedded = torch.nn.functional.embedding(batch.tokens[b : b + 1, 1:-1], target.embedding)
            one = torch.tensor([[row]])
            first, later = kind.module.unroll(
                batch.taps[b : b + 1], embedded, one, torch.zeros(1, 1, dtype=torch.long), UNROLL
            )
            for depth, x in enumerate([first, *later] if row in begun else [first]):
                at = row + depth
                if at >= batch.learn.shape[1] or not batch.learn[b, row : at + 1].all():
                    break
                if place_of(int(batch.tokens[b, at + 2])) is None:
                    continue
                logs = kind.module.logits(x)[0, 0].log_softmax(-1)
                weight = DECAY**depth / (objectives.DENSITY if depth else 1.0)
                expected -= weight * float((taught(target, batch.ahead[b, at]) * logs).sum().detach())
    assert asked == int(batch.learn.sum())
    assert float(total.detach()) == pytest.approx(expected, rel=1e-4)


def test_dspark_one_slot_at_a_time(target: TargetParts) -> None:
    kind = noisy(DSparkKind(Wanted(target, 1, TOKENS, (), seed=4)))
    batch, c = batch_for(kind, target), kind.config
    total, asked = kind.objective.loss(batch, STEP)
    rows, counts = some_of(batch.learn, batch.tokens, dspark_objective.DENSITY, 4 * objectives.SEEDS + STEP)
    expected, outside = 0.0, 0
    for b, a in torch.nonzero(counts).tolist():
        row = int(rows[b, a])
        anchor = batch.tokens[b : b + 1, row + 1 : row + 2]
        block = embedded_blocks(target.embedding, anchor, c.mask_token, c.block)
        hidden = kind.module.hidden(batch.taps[b : b + 1], block, torch.tensor([[row + 1]]))[0, 0, c.first_slot :]
        for slot in range(c.drafts):
            at = row + slot
            if at >= batch.learn.shape[1] or not batch.learn[b, at]:
                break
            before, said = batch.tokens[b, at + 1], place_of(int(batch.tokens[b, at + 2]))
            p = taught(target, batch.ahead[b, at])
            logits = kind.module.logits(hidden[slot], before)
            distance = float((p - logits.softmax(-1)).abs().sum().detach())
            cross = -float(logits.log_softmax(-1)[said].detach()) if said is not None else 0.0
            outside += said is None
            accepted, sure = (
                1 - distance / 2,
                float(torch.sigmoid(kind.module.confidence(hidden[slot], before).detach())),
            )
            judged = -(accepted * np.log(sure) + (1 - accepted) * np.log(1 - sure))
            expected += np.exp(-slot / dspark_objective.GAMMA) * (0.1 * cross + 0.9 * distance + 1.0 * judged)
    assert outside > 5
    assert asked == int(counts.sum())
    assert float(total.detach()) == pytest.approx(expected, rel=1e-4)


def test_agreement_walks_answers() -> None:
    """Of five places, chains of three: accepted 2, then (at place 3) none, then (at place 4) all there is."""
    right = torch.tensor([[[1, 1, 0], [0, 0, 0], [1, 0, 1], [0, 1, 1], [1, 0, 0]]], dtype=torch.bool)
    valid = torch.tensor([[[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]]], dtype=torch.bool)
    found = Agreement()
    found.add(right, valid)
    assert (found.tokens, found.steps) == (5, 3)
    assert found.tries == [5, 2, 1]
    assert found.hits == [3, 1, 0]
    assert found.conditional() == [3 / 5, 1 / 2, 0.0]
    other = Agreement()
    other.add(right[:, :1], valid[:, :1])
    found.merge(other)
    assert (found.tokens, found.steps, found.tries, found.hits) == (6, 4, [6, 3, 2], [4, 2, 0])
