"""EAGLE-3's trees: they grow as EAGLE-2's do (Li et al., arXiv 2406.16858), by the drafter's own probabilities."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.kernels import Executable
from slipstream.program import BLOCK_SLOTS, Draft
from slipstream.program.draft import ROOT
from slipstream.program.sampling import DrawColumns
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.checkpoint import Int32Array
from slipstream.speculation.drafter import Ask
from slipstream.speculation.eagle3 import Eagle3Drafter, Passed
from slipstream.speculation.eagle3_model import Eagle3Config
from slipstream.speculation.rows import Piece, rows_of
from slipstream.speculation.tapped import Float32Array

_FIRST_RANK, _NEXT_RANK = 0.5, 0.8
"""How likely the likeliest node is to be accepted before anything was seen, and each next one beside the one before."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How a tree grows: `depth` times, each of the `branches` likeliest nodes gets `branches` children; of all nodes
    the `tokens` likeliest are verified.
    """

    tokens: int
    depth: int
    branches: int


@dataclass
class _Tree:
    """A tree under construction: tokens, parents and log-probabilities of all nodes so far; and which of them the
    drafter has run, in the order of its rows, each with the hidden state that it is run with.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    inputs: list[Float32Array] = field(default_factory=list)

    def add_children(self, passed: Passed, row: int, parent: int) -> None:
        """The likeliest tokens after a row become nodes."""
        score = self.scores[parent] if parent != ROOT else 0.0
        tokens, logprobs = passed.drawn.tokens[row, 1:].tolist(), passed.drawn.logprobs[row, 1:].tolist()
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.tokens.append(token)
            self.parents.append(parent)
            self.scores.append(score + logprob)

    def likeliest(self, count: int, first: int = 0) -> list[int]:
        """Of the nodes from `first` on, the likeliest; ties go to the older one."""
        return sorted(range(first, len(self.tokens)), key=lambda node: (-self.scores[node], node))[:count]


class Eagle3TreeDrafter(Eagle3Drafter):
    """Drafts trees, one answer after the other. A node's class of confidence is its rank."""

    name = "eagle3-tree"
    ranked = True

    def __init__(
        self,
        config: Eagle3Config,
        over_taps: Executable,
        over_hidden: Executable,
        state: str,
        max_rows: int,
        blocks: int,
        vocabulary: Int32Array | None,
        shape: TreeShape,
    ):
        super().__init__(config, over_taps, over_hidden, state, max_rows, blocks, vocabulary, "likeliest")
        self.shape = shape
        self.most = self.classes = shape.tokens
        self.passes = shape.depth + 1

    def prior(self, draft_class: int) -> float:
        """From the node's rank."""
        return float(_FIRST_RANK * _NEXT_RANK**draft_class)

    def scratch(self, drafts: int) -> int:
        """More nodes are run than are verified."""
        return max(drafts, self.shape.depth * self.shape.branches)

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        """A tree for each answer."""
        return [self._grow(ask) for ask in asks]

    def _grow(self, ask: Ask) -> Draft:
        """Expand the likeliest nodes level by level, then keep the likeliest of all."""
        answer, tree, shape, begun = ask.answer, _Tree(), self.shape, time.perf_counter()
        passed = self._first([answer], shape.branches)
        tree.add_children(passed, 0, ROOT)
        frontier = list(range(len(tree.tokens)))
        fed = [passed.hidden[0]] * len(frontier)
        room = min(len(answer.blocks) * BLOCK_SLOTS - len(answer.tokens), self._max_rows)
        for _ in range(shape.depth):
            if len(tree.run) + len(frontier) > room:
                break
            first, made = len(tree.run), len(tree.tokens)
            tree.run += frontier
            tree.inputs += fed
            passed = self._run_all(answer, tree)
            for row in range(first, len(tree.run)):
                tree.add_children(passed, row, tree.run[row])
            frontier = tree.likeliest(shape.branches, made)
            fed = [passed.hidden[tree.run.index(tree.parents[node])] for node in frontier]
        self._clock.observe(1, (time.perf_counter() - begun) / (shape.depth + 1))
        return self._pruned(tree, ask.most)

    def _run_all(self, answer: Answer, tree: _Tree) -> Passed:
        """Run all expanded nodes: a row sees its ancestors only if they are in the same step."""
        place = {node: row for row, node in enumerate(tree.run)}
        parents = [place.get(tree.parents[node], -1) for node in tree.run]
        piece = Piece(answer, len(answer.tokens), [tree.tokens[node] for node in tree.run], parents)
        draws = DrawColumns.of([self._settings.draw(answer, [], self.shape.branches)] * len(tree.run))
        return self._run(self.over_hidden, rows_of([piece], "all"), draws, np.stack(tree.inputs))

    def _pruned(self, tree: _Tree, tokens: int) -> Draft:
        """The likeliest nodes, in the order they were made; a node is never likelier than its parent."""
        ranked = tree.likeliest(tokens)
        rank = {node: place for place, node in enumerate(ranked)}
        kept = sorted(ranked)
        place = {node: index for index, node in enumerate(kept)}
        return Draft(
            tuple(tree.tokens[node] for node in kept),
            tuple(ROOT if tree.parents[node] == ROOT else place[tree.parents[node]] for node in kept),
            tuple(rank[node] for node in kept),
            self.name,
        )
