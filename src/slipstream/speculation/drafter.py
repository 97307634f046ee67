"""Drafter: what every family of drafters offers, and what it needs of the target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.program import Draft
from slipstream.scheduling import Sequence as Answer

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter needs of its target: `taps` are layers whose inputs it reads (the number of layers: the last
    hidden state before the final norm); `embedding` and `head` say whether it uses the target's.
    """

    taps: tuple[int, ...] = ()
    embedding: bool = False
    head: bool = False


class Ask(NamedTuple):
    """Draft `most` tokens for an answer. A draft less likely than `price` to survive is not worth its place.

    `chance` is how likely a draft of a class of confidence is to be accepted, given that those before it are.
    """

    answer: Answer
    most: int
    price: float
    chance: Callable[[int], float]


class Computed(NamedTuple):
    """So many tokens of an answer, from position `start`, that the target has computed and that will stay.

    `taps` [tokens, width of all taps] are the hidden states the drafter needs there, if it needs any.
    """

    answer: Answer
    start: int
    tokens: int
    taps: Float32Array | None = None


class Drafter(ABC):
    """Proposes tokens. State of an answer, if any, follows the answer's blocks (see docs/speculation.md)."""

    name: str
    """The family, as metrics call it."""
    classes: int = 1
    """Classes of confidence."""
    most: int = 16
    """Longest draft."""
    neural: bool = False
    """Whether drafts take passes over weights, so that it is worth thinking first whether to make them."""
    certain: bool = False
    """Whether what it drafts must follow, however the answer is drawn."""
    ranked: bool = False
    """Whether drafts are trees whose classes of confidence are the ranks of their nodes."""
    passes: int = 0
    """Passes that a draft takes however long it is; 0: one for each token."""
    needs: Needs = Needs()
    fingerprint: str = ""
    """Of the target it belongs to; empty if any will do."""
    held_bytes: int = 0
    """Bytes of the weights and the cache that it keeps beside the target's."""
    state: str = ""
    """Names what it keeps in the cache's blocks; empty if nothing. Only blocks of that name are any use to it."""

    @abstractmethod
    def prior(self, draft_class: int) -> float:
        """How likely a draft of a class is to be accepted, before anything was seen."""

    def draft(self, answer: Answer, most: int) -> Draft | None:
        """A draft of at most `most` tokens from a drafter that takes no passes; it is asked at every step."""
        return self.propose([Ask(answer, most, 0.0, lambda draft_class: 1.0)])[0] if most > 0 else None

    @abstractmethod
    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        """A draft for each, None where there is nothing to propose."""

    def state_for(self, answer: Answer) -> str:
        """Names what it keeps of an answer."""
        return self.state

    def ready(self, answer: Answer) -> bool:
        """Whether an answer can be drafted for at all."""
        return True

    def commit(self, computed: Sequence[Computed]) -> None:  # noqa: B027
        """See what the target has computed for good."""

    def free(self, answer: Answer, *, learn: bool = True) -> None:  # noqa: B027
        """An answer has ended, or must begin anew: forget it, and `learn` from it if that is wanted."""

    def scratch(self, drafts: int) -> int:
        """Slots after the last known token that making so many drafts takes."""
        return drafts

    def forget(self) -> None:  # noqa: B027
        """Forget what was learned from answers that have ended."""

    def settle(self, answer: Answer) -> None:  # noqa: B027
        """An answer's blocks are about to be copied for another one: bring the state in them up to date."""

    def copy_blocks(self, pairs: npt.NDArray[np.int32]) -> None:  # noqa: B027
        """The target's blocks are copied, pairs [n, 2] of (from, to) in order, and so is the drafter's state there."""

    def irreplaceable(self, answer: Answer) -> str:
        """Names what it keeps of an answer, if it cannot make that anew from tokens; empty if it can."""
        return ""

    def kept(self, state: str, block: int) -> Sequence[npt.NDArray[np.uint8]]:
        """The bytes of what it keeps of a block under such a name, to be read and written; none under others."""
        return ()

    def pass_seconds(self, answers: int) -> float:
        """Seconds of one pass that drafts a token for each of so many answers."""
        return 0.0

    def begin_seconds(self, answers: int) -> float:
        """Seconds that the first pass of a draft takes more than the others: it takes in what the target computed."""
        return 0.0

    def doubt(self) -> None:  # noqa: B027
        """A draft was declined for its price, which may be that of a bad moment."""

    def setup_seconds(self, answer: Answer) -> float:
        """Seconds until drafting an answer can begin."""
        return 0.0
