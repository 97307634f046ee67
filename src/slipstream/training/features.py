"""Features: the target's hidden states for given tokens, computed by the engine's own program, chunk by chunk.

They are those of serving, bit for bit: a row's numbers depend neither on what else is in its step nor on how its
sequence was cut into chunks. Nothing is kept on disk: whoever needs them again has them computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.engine import Model
from slipstream.errors import UsageError
from slipstream.program import BLOCK_SLOTS, Rows
from slipstream.program.rows import NO_PARENT

Float32Array = npt.NDArray[np.float32]


class _Chunk(NamedTuple):
    """Tokens `start` to `end` of a sequence that is held in blocks from `block` on."""

    sequence: int
    start: int
    end: int
    block: int


class FeatureSource:
    """Computes hidden states at `layers` (as taps count them) with a model that was loaded with these taps."""

    def __init__(self, model: Model, layers: Sequence[int]):
        self.model, self.layers = model, tuple(layers)
        self.width = len(self.layers) * model.config.hidden
        self.computed = 0
        """Tokens so far."""

    def compute(self, sequences: Sequence[Sequence[int]]) -> list[Float32Array]:
        """[tokens, width] for each sequence. Raises UsageError for one that is longer than the model's context."""
        found = [np.empty((len(tokens), self.width), np.float32) for tokens in sequences]
        step: list[_Chunk] = []
        rows = block = 0
        for index, tokens in enumerate(sequences):
            if len(tokens) > self.model.max_len:
                raise UsageError(f"a sequence of {len(tokens)} tokens is longer than {self.model.max_len}")
            needs, start = -(-len(tokens) // BLOCK_SLOTS), 0
            if block + needs > self.model.blocks:  # those before are done with their blocks, but for the step to come
                self._run(step, sequences, found)
                step, rows, block = [], 0, 0
            while start < len(tokens):
                end = min(len(tokens), start + self.model.max_rows - rows)
                step.append(_Chunk(index, start, end, block))
                rows, start = rows + end - start, end
                if rows == self.model.max_rows:
                    self._run(step, sequences, found)
                    step, rows = [], 0
            block += needs
        self._run(step, sequences, found)
        return found

    def _run(self, step: Sequence[_Chunk], sequences: Sequence[Sequence[int]], found: list[Float32Array]) -> None:
        if not step:
            return
        columns: list[list[int]] = [[], [], [], [], []]
        tables = []
        for place, (index, start, end, block) in enumerate(step):
            first, count, slot = len(columns[0]), end - start, block * BLOCK_SLOTS
            columns[0] += [place] * count
            columns[1] += sequences[index][start:end]
            columns[2] += range(start, end)
            columns[3] += range(slot + start, slot + end)
            columns[4] += [NO_PARENT, *range(first, first + count - 1)]
            tables.append(list(range(block, block + -(-end // BLOCK_SLOTS))))
        output = self.model.executable.step(Rows.of_columns(columns, [], tables), None)
        taps = np.concatenate([output.taps[f"layer.{layer}"] for layer in self.layers], axis=1)
        first = 0
        for index, start, end, _ in step:
            found[index][start:end] = taps[first : first + end - start]
            first += end - start
        self.computed += first
