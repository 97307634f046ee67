"""Both: two neural drafters that keep state of different answers, seen as one by whoever moves blocks about."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from slipstream.program import Draft
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.drafter import Ask, Computed, Drafter


class Both(Drafter):
    """`whose` says which of the drafters an answer belongs to, if any."""

    name = "both"
    neural = True

    def __init__(
        self,
        drafters: Sequence[Drafter],
        whose: Callable[[Answer], Drafter | None],
        also: Callable[[Sequence[Computed]], None] = lambda computed: None,
    ):
        """`also` hears of everything that is computed."""
        self.drafters, self._whose, self._also = list(drafters), whose, also
        self.needs = drafters[0].needs

    def prior(self, draft_class: int) -> float:
        """Nobody asks: the drafters themselves are asked."""
        return 0.0

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        """Each answer's own drafter's."""
        return [None if (d := self._whose(ask.answer)) is None else d.propose([ask])[0] for ask in asks]

    def state_for(self, answer: Answer) -> str:
        """Its drafter's."""
        drafter = self._whose(answer)
        return drafter.state_for(answer) if drafter is not None else ""

    def ready(self, answer: Answer) -> bool:
        """Its drafter's word."""
        drafter = self._whose(answer)
        return drafter is not None and drafter.ready(answer)

    def commit(self, computed: Sequence[Computed]) -> None:
        """To each what is its own."""
        for drafter in self.drafters:
            if mine := [entry for entry in computed if self._whose(entry.answer) is drafter]:
                drafter.commit(mine)
        self._also(computed)

    def free(self, answer: Answer, *, learn: bool = True) -> None:
        """To its drafter."""
        if (drafter := self._whose(answer)) is not None:
            drafter.free(answer, learn=learn)

    def scratch(self, drafts: int) -> int:
        """What the more demanding one takes."""
        return max(drafter.scratch(drafts) for drafter in self.drafters)

    def settle(self, answer: Answer) -> None:
        """To its drafter."""
        if (drafter := self._whose(answer)) is not None:
            drafter.settle(answer)

    def copy_blocks(self, pairs: npt.NDArray[np.int32]) -> None:
        """Blocks do not say whose they are."""
        for drafter in self.drafters:
            drafter.copy_blocks(pairs)

    def irreplaceable(self, answer: Answer) -> str:
        """Its drafter's."""
        drafter = self._whose(answer)
        return drafter.irreplaceable(answer) if drafter is not None else ""

    def kept(self, state: str, block: int) -> Sequence[npt.NDArray[np.uint8]]:
        """Of the one whose state it is."""
        return next((parts for drafter in self.drafters if (parts := drafter.kept(state, block))), ())

    def begin_seconds(self, answers: int) -> float:
        """Of the newer one."""
        return self.drafters[-1].begin_seconds(answers)

    def pass_seconds(self, answers: int) -> float:
        """Of the newer one."""
        return self.drafters[-1].pass_seconds(answers)
