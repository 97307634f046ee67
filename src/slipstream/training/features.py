"""Features: the target's hidden states for given tokens, computed by the engine's own program, chunk by chunk.

They are those of serving, bit for bit: a row's numbers depend neither on what else is in its step, nor on how its
sequence was cut into chunks, nor on whether its beginning was computed with another's. Nothing is kept on disk: whoever
needs them again has them computed again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.engine import Model
from slipstream.errors import UsageError
from slipstream.program import BLOCK_SLOTS, Rows
from slipstream.program.rows import NO_PARENT

Float32Array = npt.NDArray[np.float32]

ALIKE = 4
"""Sequences that must begin alike for their beginning to be computed once and kept."""
KEPT_SHARE = 8
"""1/KEPT_SHARE of the blocks, at most, holds such beginnings."""


@dataclass(frozen=True, slots=True)
class _Beginning:
    """Tokens, a whole number of blocks, with what was computed of them."""

    tokens: tuple[int, ...]
    blocks: list[int]
    states: Float32Array


class _Chunk(NamedTuple):
    """Tokens `start` to `end` of a sequence that is held in these blocks."""

    sequence: int
    start: int
    end: int
    blocks: list[int]


class FeatureSource:
    """Computes hidden states at `layers` (as taps count them) with a model that was loaded with these taps.

    What many sequences begin with stays in the model's cache from one call to the next: who lets somebody else compute
    there, too, must say so (`forget`).
    """

    def __init__(self, model: Model, layers: Sequence[int]):
        self.model, self.layers = model, tuple(layers)
        self.width = len(self.layers) * model.config.hidden
        self.computed = 0
        """Rows so far."""
        self._beginnings: dict[tuple[int, ...], _Beginning] = {}
        self._kept = 0

    def compute(self, sequences: Sequence[Sequence[int]]) -> list[Float32Array]:
        """[tokens, width] for each sequence. Raises UsageError for one that is longer than the model's context."""
        for tokens in sequences:
            if len(tokens) > self.model.max_len:
                raise UsageError(f"a sequence of {len(tokens)} tokens is longer than {self.model.max_len}")
        begun = self._begun(sequences)
        found = [np.empty((len(tokens), self.width), np.float32) for tokens in sequences]
        step: list[_Chunk] = []
        rows, block = 0, self._kept
        for index, (tokens, beginning) in enumerate(zip(sequences, begun, strict=True)):
            start, known = 0, list[int]()
            if beginning is not None:
                start, known = len(beginning.tokens), beginning.blocks
                found[index][:start] = beginning.states
            needs = -(-len(tokens) // BLOCK_SLOTS) - len(known)
            if block + needs > self.model.blocks:  # those before are done with their blocks, but for the step to come
                self._run(step, sequences, found)
                step, rows, block = [], 0, self._kept
            blocks = [*known, *range(block, block + needs)]
            while start < len(tokens):
                end = min(len(tokens), start + self.model.max_rows - rows)
                step.append(_Chunk(index, start, end, blocks))
                rows, start = rows + end - start, end
                if rows == self.model.max_rows:
                    self._run(step, sequences, found)
                    step, rows = [], 0
            block += needs
        self._run(step, sequences, found)
        return found

    def forget(self) -> None:
        """Others have written to the model's cache."""
        self._beginnings.clear()
        self._kept = 0

    def _begun(self, sequences: Sequence[Sequence[int]]) -> list[_Beginning | None]:
        """For each sequence what was computed of its beginning, if enough others begin alike."""
        begun: list[_Beginning | None] = [None] * len(sequences)
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, tokens in enumerate(sequences):
            alike[tuple(tokens[:BLOCK_SLOTS])].append(index)
        for members in alike.values():
            if len(members) < ALIKE:
                continue
            texts = sorted(list(sequences[index]) for index in members)
            shared = min(_alike(texts[0], texts[-1]), *(len(text) - 1 for text in texts)) // BLOCK_SLOTS * BLOCK_SLOTS
            beginning = self._beginning(tuple(sequences[members[0]][:shared])) if shared else None
            for index in members:
                begun[index] = beginning
        return begun

    def _beginning(self, tokens: tuple[int, ...]) -> _Beginning | None:
        """The beginning, computed now unless it is known; None if there are no blocks for it."""
        if tokens in self._beginnings:
            return self._beginnings[tokens]
        needs = len(tokens) // BLOCK_SLOTS
        if self._kept + needs > self.model.blocks // KEPT_SHARE:
            return None
        states = np.empty((len(tokens), self.width), np.float32)
        blocks = list(range(self._kept, self._kept + needs))
        for start in range(0, len(tokens), self.model.max_rows):
            end = min(len(tokens), start + self.model.max_rows)
            self._run([_Chunk(0, start, end, blocks)], [tokens], [states])
        self._kept += needs
        beginning = self._beginnings[tokens] = _Beginning(tokens, blocks, states)
        return beginning

    def _run(self, step: Sequence[_Chunk], sequences: Sequence[Sequence[int]], found: list[Float32Array]) -> None:
        if not step:
            return
        columns: list[list[int]] = [[], [], [], [], []]
        for place, (index, start, end, blocks) in enumerate(step):
            first, count = len(columns[0]), end - start
            columns[0] += [place] * count
            columns[1] += sequences[index][start:end]
            columns[2] += range(start, end)
            columns[3] += [blocks[at // BLOCK_SLOTS] * BLOCK_SLOTS + at % BLOCK_SLOTS for at in range(start, end)]
            columns[4] += [NO_PARENT, *range(first, first + count - 1)]
        tables = [chunk.blocks[: -(-chunk.end // BLOCK_SLOTS)] for chunk in step]
        output = self.model.executable.step(Rows.of_columns(columns, [], tables), None)
        taps = output.joined([f"layer.{layer}" for layer in self.layers])
        first = 0
        for index, start, end, _ in step:
            found[index][start:end] = taps[first : first + end - start]
            first += end - start
        self.computed += first


def _alike(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens by which two sequences begin alike; the first and last of many in order are the most unlike."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
