"""The torch modules compute what the engine runs, see nothing they must not, and unroll as drafting does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.kernels.reference import ReferenceBackend
from slipstream.models import read_config, record_program
from slipstream.models.weights import ModelWeights
from slipstream.program import KVFormat, Rows, ShardPlan
from slipstream.speculation.dspark_model import HIDDEN as BLOCK_HIDDEN
from slipstream.speculation.dspark_model import dspark_weights, read_dspark, record_block, record_context
from slipstream.speculation.eagle3_model import HIDDEN, eagle3_weights, read_eagle3, record_eagle3
from slipstream.training.batches import Batch, Item
from slipstream.training.dataset import Example
from slipstream.training.export import write_dspark, write_eagle3
from slipstream.training.kinds import DSparkKind, Eagle3Kind, Wanted
from slipstream.training.modules.dspark import embedded_blocks
from slipstream.training.target import TargetParts
from slipstream.weights.open import open_checkpoint

TOKENS, LENGTH = np.arange(3, 259, 2, dtype=np.int32), 24


@pytest.fixture(scope="module")
def target(tiny_gguf: Path) -> TargetParts:
    return TargetParts.of(open_checkpoint(tiny_gguf))


def rough(kind: Any) -> Any:
    """Weights that are all of a size at which each shows, and the same in the file as in memory."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in kind.module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scaled = noise / parameter.shape[-1] ** 0.5 if parameter.ndim == 2 else 1.0 + 0.2 * noise
            parameter.copy_(scaled.to(torch.bfloat16) if "bias" not in name else 0.1 * noise)
    return kind


@pytest.fixture(scope="module")
def eagle3(target: TargetParts) -> Eagle3Kind:
    return rough(Eagle3Kind(Wanted(target, 1, TOKENS, ())))


@pytest.fixture(scope="module")
def dspark(target: TargetParts) -> DSparkKind:
    return rough(DSparkKind(Wanted(target, 1, TOKENS, ())))


def chained(tokens: list[int], start: int) -> Rows:
    numbers = list(range(start, start + len(tokens)))
    parents = [-1, *range(len(tokens) - 1)]
    return Rows.of_columns([[0] * len(tokens), tokens, numbers, numbers, parents], range(len(tokens)), [list(range(8))])


def given(width: int, seed: int = 0) -> tuple[list[int], np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 259, LENGTH).tolist(), rng.standard_normal((LENGTH, width)).astype(np.float32)


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_eagle3_is_what_the_engine_runs(
    eagle3: Eagle3Kind, target: TargetParts, tiny_gguf: Path, tmp_path: Path, layout: Any
) -> None:
    """Written, read back and run: over the target's hidden states, and then over its own, step after step."""
    weights = dict(eagle3.module.named_parameters())
    write_eagle3(tmp_path, eagle3.config, weights, TOKENS, layout, "tiny", target.config.layers, 512)
    checkpoint = open_checkpoint(tmp_path)
    c = read_eagle3(checkpoint, target.config.layers, target.config.hidden)
    assert c == eagle3.config
    found, tokens = eagle3_weights(c, checkpoint, target_weights(tiny_gguf))
    assert tokens is not None
    assert tokens.tolist() == TOKENS.tolist()
    over_taps = ReferenceBackend().compile(record_eagle3(c, 64, KVFormat.F32, "t", from_taps=True), found, 8)
    over_hidden = over_taps.sibling(record_eagle3(c, 64, KVFormat.F32, "t", from_taps=False))
    said, taps = given(len(c.taps) * c.tap_width)
    embedded = embedding_of(tiny_gguf)[torch.tensor(said[1:])][None]
    rows_of_all = torch.arange(LENGTH - 1)[None]
    at, later = eagle3.module.unroll(torch.from_numpy(taps[None, :-1]), embedded, rows_of_all, rows_of_all, 3)
    logits = [eagle3.module.logits(x)[0].detach().numpy() for x in (at, *later)]
    rows = chained(said[1:], 1)
    output = over_taps.step(rows, None, logits=True, inputs=taps[:-1])
    assert output.logits is not None
    assert np.abs(output.logits - logits[0]).max() < 1e-4
    first = 9  # a chain that begins there: the next rows have the drafter's own hidden states
    hidden = output.taps[HIDDEN][first : first + 1]
    for step in (1, 2):
        place = first + step
        one = Rows.of_columns([[0], [said[place + 1]], [place + 1], [place + 1], [-1]], [0], [list(range(8))])
        later = over_hidden.step(one, None, logits=True, inputs=hidden)
        assert later.logits is not None
        assert np.abs(later.logits[0] - logits[step][first]).max() < 1e-4
        hidden = later.taps[HIDDEN]


def target_weights(path: Path) -> ModelWeights:
    checkpoint = open_checkpoint(path)
    return ModelWeights(read_config(checkpoint), checkpoint)


def embedding_of(path: Path) -> torch.Tensor:
    """In float32, as the engine of these tests has it."""
    weights = target_weights(path)
    program = record_program(weights.config, max_len=64, kv_format=KVFormat.F32)
    return torch.from_numpy(weights.float32(program.weights["embed.weight"], ShardPlan()).copy())


def test_dspark_is_what_the_engine_runs(
    dspark: DSparkKind, target: TargetParts, tiny_gguf: Path, tmp_path: Path
) -> None:
    weights = dict(dspark.module.named_parameters())
    write_dspark(tmp_path, dspark.config, weights, TOKENS, "speculators", "tiny", 512)
    checkpoint = open_checkpoint(tmp_path)
    c = read_dspark(checkpoint, target.config.layers, target.config.hidden)
    assert c == dspark.config
    found, _ = dspark_weights(c, checkpoint, target_weights(tiny_gguf))
    block = ReferenceBackend().compile(record_block(c, 64, KVFormat.F32, "t"), found, 8)
    context = block.sibling(record_context(c, 64, KVFormat.F32, "t"))
    said, taps = given(len(c.taps) * c.tap_width)
    anchors = torch.tensor([[5, 11]])
    blocks = embedded_blocks(embedding_of(tiny_gguf), torch.tensor([[said[5], said[11]]]), c.mask_token, c.block)
    hidden = dspark.module.hidden(torch.from_numpy(taps[None]), blocks, anchors).detach().numpy()[0]
    done = 0
    for place, anchor in enumerate((5, 11)):
        context.step(chained([0] * (anchor - done), done), None, inputs=taps[done:anchor])
        done = anchor
        rows = chained([said[anchor], *[c.mask_token] * (c.block - 1)], anchor)
        output = block.step(rows, None, logits=True)
        assert np.abs(output.taps[BLOCK_HIDDEN] - hidden[place]).max() < 1e-4
        assert output.logits is not None
        theirs = torch.from_numpy(hidden[place]) @ dspark.module.lm_head.weight.T
        assert np.abs(output.logits - theirs.detach().numpy()).max() < 1e-4


def batch_of(tokens: list[int], taps: np.ndarray, ahead: np.ndarray) -> Batch:
    example = Example(tuple(tokens), ((4, len(tokens)),))
    states = torch.from_numpy(np.concatenate([taps, ahead], 1)).to(torch.bfloat16)
    return Batch.of([Item(example, states)], taps.shape[1])


@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_nothing_later_matters(name: str, request: pytest.FixtureRequest) -> None:
    """Tokens after a row's own, and hidden states after its position, change nothing before them."""
    kind = request.getfixturevalue(name)
    said, taps = given(len(kind.taps) * 64)
    others, other_taps = given(len(kind.taps) * 64, 1)
    place = 13
    changed = [*said[: place + 1], *others[place + 1 :]], np.concatenate([taps[:place], other_taps[place:]])
    if name == "eagle3":
        outs = []
        for tokens, states in ((said, taps), changed):
            embedded = kind.wanted.target.embedding.float()[torch.tensor(tokens[1:])][None]
            every = torch.arange(LENGTH - 1)[None]
            at, later = kind.module.unroll(torch.from_numpy(states[None, :-1]), embedded, every, every, 3)
            outs.append([at[0], *(x[0] for x in later)])
        for depth, (before, after) in enumerate(zip(*outs, strict=True)):  # of chains, by where they began
            assert torch.equal(before[: place - depth], after[: place - depth])
            assert not torch.equal(before[place - depth + 1], after[place - depth + 1])
        return
    results = []
    for tokens, states in ((said, taps), changed):
        anchors = torch.tensor([[place, place + 4]])
        embedding = kind.wanted.target.embedding
        blocks = embedded_blocks(embedding, torch.tensor([[tokens[place], tokens[place + 4]]]), 258, 7).float()
        results.append(kind.module.hidden(torch.from_numpy(states[None]), blocks, anchors)[0])
    assert torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][1], results[1][1])


def test_a_row_learns_the_token_after_the_next() -> None:
    said = list(range(10))
    states = np.arange(10, dtype=np.float32)[:, None].repeat(8, 1)
    batch = batch_of(said, states[:, :6], states[:, :2])
    assert batch.learn[0].tolist() == [False] * 3 + [True] * 5
    assert batch.tokens[0].tolist() == said
    assert batch.taps[0, :, 0].tolist() == list(range(8))
    assert batch.ahead[0, :, 0].tolist() == list(range(1, 9))
    rows = [t for t in range(8) if batch.learn[0, t]]
    assert [t + 2 for t in rows] == [5, 6, 7, 8, 9]  # the answer's first token, 4, comes with the prompt
