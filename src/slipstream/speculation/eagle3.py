"""EAGLE-3 (Li et al., arXiv 2503.01840): a small model that reads the target's hidden states, and then its own.

A row is a token with the hidden state of the position before it. For tokens that the target has computed that is the
target's (joined taps); for drafts it is the drafter's own. Rows of drafts are scratch: once tokens are accepted they
are run again with the target's hidden states. Drafts are chains, or trees that grow as EAGLE-2's do (arXiv 2406.16858).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.kernels import Executable
from slipstream.kernels.backend import StepOutput
from slipstream.program import BLOCK_SLOTS, Draft
from slipstream.program.draft import ROOT
from slipstream.program.sampling import DrawColumns
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.checkpoint import Int32Array
from slipstream.speculation.drafter import Ask, Needs
from slipstream.speculation.eagle3_model import HIDDEN, Eagle3Config
from slipstream.speculation.rows import Piece, rows_of
from slipstream.speculation.settings import PRIORS, DraftSettings, class_of
from slipstream.speculation.tapped import Float32Array, TappedDrafter


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How a tree grows: `depth` times, each of the `branches` likeliest nodes gets `branches` children; of all nodes
    the `tokens` likeliest are verified.
    """

    tokens: int
    depth: int
    branches: int


@dataclass
class _Growing:
    """A tree under construction: `tokens` and `parents` of all nodes so far, their log-probabilities, and which of them
    the drafter has run, in the order of its rows, with the hidden state that each was run with.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    inputs: list[Float32Array] = field(default_factory=list)
    frontier: list[int] = field(default_factory=list)


class Eagle3Drafter(TappedDrafter):
    """Drafts chains, or trees if it is given the shape of one."""

    name = "eagle3"
    classes = len(PRIORS)
    most = 8
    shift = 1

    def __init__(
        self,
        config: Eagle3Config,
        over_taps: Executable,
        over_hidden: Executable,
        state: str,
        max_rows: int,
        blocks: int,
        vocabulary: Int32Array | None,
        *,
        coupled: bool = True,
        tree: TreeShape | None = None,
    ):
        """`over_taps` and `over_hidden` run the programs of `record_eagle3` over the same weights and cache."""
        super().__init__(over_taps, state, len(config.taps) * config.tap_width, blocks)
        self.over_taps, self.over_hidden = over_taps, over_hidden
        self.needs = Needs(config.taps, embedding=True)
        self.tree, self._max_rows = tree, max_rows
        self._settings = DraftSettings(vocabulary, coupled=coupled)
        self._pass: dict[int, float] = {}
        if tree is not None:
            self.name, self.most, self.passes = "eagle3-tree", tree.tokens, tree.depth + 1
            self.classes, self.marginal = tree.tokens, True

    def prior(self, draft_class: int) -> float:
        """From the probability that the drafter gives its token; in a tree, from the node's rank."""
        return 0.5 * 0.8**draft_class if self.tree is not None else PRIORS[draft_class]

    def scratch(self, drafts: int) -> int:
        """A tree runs more nodes than are verified."""
        return drafts if self.tree is None else max(drafts, self.tree.depth * self.tree.branches)

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        """A chain or a tree for each answer."""
        if self.tree is not None:
            return [self._grow(ask, self.tree) for ask in asks]
        tokens: list[list[int]] = [[] for _ in asks]
        classes: list[list[int]] = [[] for _ in asks]
        alive = [1.0] * len(asks)
        going = list(range(len(asks)))[: self._max_rows // 2]
        hidden: list[Float32Array] = []
        while going:
            begun = time.perf_counter()
            answers = [asks[index].answer for index in going]
            if not hidden:
                output, rows = self._first(answers, 0)
            else:
                pieces = [
                    Piece(a, len(a.tokens) - 1 + len(tokens[i]), tokens[i][-1:])
                    for i, a in zip(going, answers, strict=True)
                ]
                output, rows = self._run(pieces, hidden, [tokens[i] for i in going]), len(going)
            drawn = output.drawn
            assert drawn is not None
            still, kept = [], []
            for place, index in enumerate(going):
                ask, probability = asks[index], float(np.exp(drawn.logprobs[place, 0]))
                tokens[index].append(int(drawn.tokens[place, 0]))
                classes[index].append(class_of(probability))
                alive[index] *= ask.chance(classes[index][-1])
                if len(tokens[index]) < ask.most and alive[index] >= ask.price:
                    still.append(index)
                    kept.append(output.taps[HIDDEN][place])
            self._observe(len(going), rows, time.perf_counter() - begun)
            going, hidden = still, kept
        return [Draft.chain(t, c, self.name) for t, c in zip(tokens, classes, strict=True)]

    def _first(self, answers: Sequence[Answer], likeliest: int) -> tuple[StepOutput, int]:
        """Take in what waits, and draw after the last known token of each; hidden states are those of the last rows."""
        pieces, inputs = self._pieces(answers)
        draws = DrawColumns.of([self._settings.draw(answer, [], likeliest) for answer in answers])
        rows = rows_of(pieces)
        output = self.over_taps.step(rows, draws, inputs=inputs)
        return StepOutput(output.drawn, taps={HIDDEN: output.taps[HIDDEN][rows.logit_rows]}), len(rows)

    def _run(self, pieces: Sequence[Piece], hidden: Sequence[Float32Array], drafts: Sequence[list[int]]) -> StepOutput:
        """Run drafts with the drafter's own hidden states."""
        draws = DrawColumns.of([self._settings.draw(p.answer, d) for p, d in zip(pieces, drafts, strict=True)])
        return self.over_hidden.step(rows_of(pieces), draws, inputs=np.stack(hidden))

    def _pieces(self, answers: Sequence[Answer]) -> tuple[list[Piece], Float32Array]:
        """Rows for what waits, as far as their tokens are known; they count as drafted from now on."""
        pieces, inputs = [], []
        for answer in answers:
            waiting = self._waiting[id(answer)]
            start = waiting.start + 1
            count = min(waiting.count, len(answer.tokens) - start)
            inputs.append(waiting.take(count))
            pieces.append(Piece(answer, start, answer.tokens[start : start + count]))
            answer.drafted = start + count
        return pieces, np.concatenate(inputs)

    def _take_in(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            waiting = self._waiting[id(answer)]
            while (count := min(waiting.count, len(answer.tokens) - waiting.start - 1, self._max_rows)) > 0:
                start = waiting.start + 1
                piece = Piece(answer, start, answer.tokens[start : start + count])
                self.over_taps.step(rows_of([piece], "none"), None, inputs=waiting.take(count))
                answer.drafted = start + count

    def _grow(self, ask: Ask, shape: TreeShape) -> Draft | None:
        """EAGLE-2's tree: expand the likeliest nodes level by level, then keep the likeliest of all."""
        answer, tree = ask.answer, _Growing()
        begun = time.perf_counter()
        output, _ = self._first([answer], shape.branches)
        self._children(tree, output, 0, ROOT, 0.0)
        tree.frontier = list(range(len(tree.tokens)))
        fed = [output.taps[HIDDEN][0]] * len(tree.frontier)
        room = len(answer.blocks) * BLOCK_SLOTS - len(answer.tokens)
        for _ in range(shape.depth):
            if len(tree.run) + len(tree.frontier) > min(room, self._max_rows):
                break
            first = len(tree.run)
            tree.run += tree.frontier
            tree.inputs += fed
            output = self._run_tree(answer, tree)
            made = len(tree.tokens)
            for row in range(first, len(tree.run)):
                self._children(tree, output, row, tree.run[row], tree.scores[tree.run[row]])
            children = sorted(range(made, len(tree.tokens)), key=lambda node: -tree.scores[node])[: shape.branches]
            fed = [output.taps[HIDDEN][tree.run.index(tree.parents[node])] for node in children]
            tree.frontier = children
        self._observe(1, 1, (time.perf_counter() - begun) / (shape.depth + 1))
        return self._pruned(tree, min(ask.most, shape.tokens))

    def _children(self, tree: _Growing, output: StepOutput, row: int, parent: int, score: float) -> None:
        """The likeliest tokens after a row become nodes."""
        drawn = output.drawn
        assert drawn is not None
        for token, logprob in zip(drawn.tokens[row, 1:].tolist(), drawn.logprobs[row, 1:].tolist(), strict=True):
            tree.tokens.append(token)
            tree.parents.append(parent)
            tree.scores.append(score + logprob)

    def _run_tree(self, answer: Answer, tree: _Growing) -> StepOutput:
        """Run all expanded nodes: a row sees its ancestors only if they are in the same step."""
        assert self.tree is not None
        place = {node: row for row, node in enumerate(tree.run)}
        parents = [place.get(tree.parents[node], -1) for node in tree.run]
        piece = Piece(answer, len(answer.tokens), [tree.tokens[node] for node in tree.run], parents)
        draw = self._settings.draw(answer, [], self.tree.branches)
        draws = DrawColumns.of([draw] * len(tree.run))
        return self.over_hidden.step(rows_of([piece], "all"), draws, inputs=np.stack(tree.inputs))

    def _pruned(self, tree: _Growing, tokens: int) -> Draft:
        """The likeliest nodes in the order they were made; a node is never likelier than its parent."""
        ranked = sorted(range(len(tree.tokens)), key=lambda node: (-tree.scores[node], node))[:tokens]
        rank = {node: place for place, node in enumerate(ranked)}
        kept = sorted(ranked)
        place = {node: index for index, node in enumerate(kept)}
        return Draft(
            tuple(tree.tokens[node] for node in kept),
            tuple(ROOT if tree.parents[node] == ROOT else place[tree.parents[node]] for node in kept),
            tuple(rank[node] for node in kept),
            self.name,
        )

    def pass_seconds(self, answers: int) -> float:
        """As measured lately, or what is known of other numbers."""
        if not self._pass:
            return 0.0
        return self._pass[min(self._pass, key=lambda count: abs(count - answers))]

    def _observe(self, answers: int, rows: int, seconds: float) -> None:
        if rows <= 2 * answers:
            bucket = 1 << (answers - 1).bit_length()
            self._pass[bucket] = 0.9 * self._pass.get(bucket, seconds) + 0.1 * seconds

    def free(self, answer: Answer) -> None:
        """Forget an answer."""
        super().free(answer)
        self._settings.forget(answer)
