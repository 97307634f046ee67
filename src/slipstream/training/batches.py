"""Batches: examples with their features, in rounds, from a ring of bounded size.

A round has its features computed, is learned from, and is learned from again a few rounds later (`uses`); then its
features are dropped. What a round consists of depends on the seed and the examples alone, so that training can begin
again at any round, and so that several processes can share the work: each has the examples whose turn is its own.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.training.dataset import Example
from slipstream.training.features import FeatureSource

GAP = 2
"""Rounds between two uses of the same features."""


@dataclass(frozen=True, slots=True)
class Item:
    """An example and its features: `states` [tokens, taps and last hidden state side by side], bfloat16."""

    example: Example
    states: Tensor


Entry = tuple[Example, Item | None]
"""An example of a round; without its features where it is another process's."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Row t of an example stands for its position t: `tokens` [B, T + 2]; `taps` [B, T, taps]; `ahead` [B, T, hidden],
    the target's last hidden state at t + 1; `learn` [B, T], whether token t + 2 is the target's.
    """

    tokens: Tensor
    taps: Tensor
    ahead: Tensor
    learn: Tensor

    @classmethod
    def of(cls, items: Sequence[Item], tap_width: int) -> Batch:
        """Examples side by side, padded."""
        rows = max(1, max((len(item.example.tokens) for item in items), default=0) - 2)
        hidden = items[0].states.shape[1] - tap_width
        tokens = torch.zeros(len(items), rows + 2, dtype=torch.long)
        taps = torch.zeros(len(items), rows, tap_width, dtype=torch.bfloat16)
        ahead = torch.zeros(len(items), rows, hidden, dtype=torch.bfloat16)
        learn = torch.zeros(len(items), rows, dtype=torch.bool)
        for index, item in enumerate(items):
            count = len(item.example.tokens) - 2
            if count < 1:
                continue
            tokens[index, : count + 2] = torch.tensor(item.example.tokens)
            taps[index, :count] = item.states[:count, :tap_width]
            ahead[index, :count] = item.states[1 : count + 1, tap_width:]
            for start, stop in item.example.spans:
                # An answer's first token comes with its prompt, and is never drafted.
                learn[index, max(start - 1, 0) : stop - 2] = True
        return cls(tokens, taps, ahead, learn)


class Ring:
    """Rounds of items. `mine` says which turns are this process's: (rank, processes)."""

    def __init__(
        self,
        source: FeatureSource,
        order: Iterator[Example],
        round_tokens: int,
        uses: int,
        seed: int,
        mine: tuple[int, int] = (0, 1),
    ):
        self._source, self._order, self._seed = source, order, seed
        self._round_tokens, self._uses, self._mine = round_tokens, uses, mine
        self._kept: deque[list[Entry]] = deque(maxlen=GAP * (uses - 1) + 1)
        self.number = 0
        """Rounds so far."""
        self.tokens = 0
        """Tokens of answers that rounds have brought for the first time."""

    def skip(self, rounds: int) -> None:
        """Begin after so many rounds: those whose features are still of use have them computed again."""
        for number in range(rounds):
            self._kept.append(self._next(compute=number >= rounds - (self._kept.maxlen or 1)))

    def round(self) -> list[Entry]:
        """The next round's examples, new ones and those that are used again, shuffled."""
        self._kept.append(self._next(compute=True))
        used = [
            entry
            for use in range(self._uses)
            if GAP * use < len(self._kept)
            for entry in self._kept[len(self._kept) - 1 - GAP * use]
        ]
        random.Random(f"{self._seed} {self.number}").shuffle(used)
        return used

    def _next(self, *, compute: bool) -> list[Entry]:
        examples: list[Example] = []
        count = 0
        while count < self._round_tokens:
            example = next(self._order)
            examples.append(example)
            count += len(example.tokens)
            self.tokens += example.answered
        self.number += 1
        rank, processes = self._mine
        own = [place % processes == rank for place in range(len(examples))]
        wanted = [example for example, mine in zip(examples, own, strict=True) if mine]
        found = iter(self._source.compute([example.tokens for example in wanted]) if compute else [])
        return [
            (e, Item(e, torch.from_numpy(next(found)).to(torch.bfloat16)) if mine and compute else None)
            for e, mine in zip(examples, own, strict=True)
        ]


def batches_of(entries: Sequence[Entry], batch_tokens: int) -> Iterator[list[Entry]]:
    """Entries in groups of so many tokens, padding not counted."""
    group: list[Entry] = []
    count = 0
    for entry in entries:
        group.append(entry)
        count += len(entry[0].tokens)
        if count >= batch_tokens:
            yield group
            group, count = [], 0
    if group:
        yield group
