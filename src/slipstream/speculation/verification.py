"""Verification: which draft tokens hold, and what comes out of a step in their place."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from slipstream.program import Draft
from slipstream.program.draft import ROOT
from slipstream.scheduling import Sequence as Answer

Float32Array = npt.NDArray[np.float32]


class Verdict(NamedTuple):
    """Draft tokens that hold, from the first on, and the tokens that come out: those, and one more."""

    held: list[int]
    tokens: list[int]


class Verification(Protocol):
    """A rule. With `wants_logits` it is given the target's logits [1 + drafts, vocabulary], as the model has them."""

    wants_logits: bool

    def verify(self, answer: Answer, draft: Draft, drawn: Sequence[int], logits: Float32Array | None) -> Verdict:
        """Judge a draft, given what the target drew after the last known token and after each draft token."""


class ExactVerification:
    """A draft token holds if it is what the target draws itself: the answer is that of plain decoding, bit for bit."""

    wants_logits = False

    def verify(self, answer: Answer, draft: Draft, drawn: Sequence[int], logits: Float32Array | None) -> Verdict:
        """Follow the draft as long as the target says the same."""
        held = draft.accepted(drawn)
        return Verdict(held, [drawn[0], *(drawn[1 + index] for index in held)])


class ForcedVerification:
    """For measuring v and d apart from the drafter: each draft token holds with one chance, whatever it says.

    Of a tree those along the first branches do.

    What comes out is no answer to anything.
    """

    wants_logits = False

    def __init__(self, chance: float, seed: int = 0):
        self.chance, self._random = chance, random.Random(seed)

    def verify(self, answer: Answer, draft: Draft, drawn: Sequence[int], logits: Float32Array | None) -> Verdict:
        """Throw a coin for each draft."""
        held, at = [], ROOT
        for index, parent in enumerate(draft.parents):
            if parent != at:
                continue
            if self._random.random() >= self.chance:
                break
            held.append(index)
            at = index
        return Verdict(held, [*(draft.tokens[index] for index in held), drawn[at + 1]])
