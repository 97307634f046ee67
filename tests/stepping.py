"""Drives an executable directly: rows for sequences that own their blocks one after another."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slipstream.kernels import Executable
from slipstream.program import BLOCK_SLOTS, Row, Rows


@dataclass
class Sequence:
    """Tokens of one sequence, how many are cached, and the blocks they lie in."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    logits: list[np.ndarray] = field(default_factory=list)

    def slot(self, position: int) -> int:
        return self.blocks[position // BLOCK_SLOTS] * BLOCK_SLOTS + position % BLOCK_SLOTS


def advance(executable: Executable, spans: list[tuple[Sequence, int]]) -> None:
    """One step: the next `count` tokens of each sequence; logits of all rows are kept."""
    rows: list[Row] = []
    for index, (sequence, count) in enumerate(spans):
        for offset in range(count):
            position = sequence.computed + offset
            parent = len(rows) - 1 if offset else -1
            rows.append(Row(index, sequence.tokens[position], position, sequence.slot(position), parent, True))
    tables = [sequence.blocks for sequence, _ in spans]
    out = executable.step(Rows.of(rows, tables), None, logits=True)
    assert out.logits is not None
    at = 0
    for sequence, count in spans:
        sequence.logits.extend(out.logits[at : at + count].copy())
        sequence.computed += count
        at += count


def advance_some(
    executable: Executable, sequences: list[Sequence], rng: np.random.Generator, room: int, singly: int = 0
) -> None:
    """One step of at most `room` rows: some of the sequences, by as many tokens as chance has it.

    The last `singly` tokens of a sequence come one by one.
    """
    spans: list[tuple[Sequence, int]] = []
    for index in rng.permutation(len(sequences)):
        sequence = sequences[index]
        rest = len(sequence.tokens) - sequence.computed
        left = min(rest, room)
        if left and rng.random() < 0.65:
            count = 1 if rest <= singly else int(rng.integers(1, left + 1))
            spans.append((sequence, count))
            room -= count
    if spans:
        advance(executable, spans)


def run_alone(executable: Executable, tokens: list[int], chunk: int = 1 << 30) -> np.ndarray:
    """Logits [tokens, vocabulary] of one sequence, computed in chunks."""
    blocks = list(range(-(-len(tokens) // BLOCK_SLOTS)))
    sequence = Sequence(tokens, blocks)
    while sequence.computed < len(tokens):
        advance(executable, [(sequence, min(chunk, len(tokens) - sequence.computed))])
    return np.stack(sequence.logits)
