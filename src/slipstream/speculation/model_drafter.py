"""Drafts from a smaller model with the target's tokenizer (Leviathan et al., arXiv 2211.17192), one pass a token.

The model keeps keys and values under the target's own block tables, in an arena of its own. It runs only when it is
asked to draft: until then tokens pile up that it has not seen, and the first pass computes them all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slipstream.kernels import Executable
from slipstream.program import BLOCK_SLOTS, Draft, Proposal, Rows
from slipstream.program.sampling import Draw, DrawColumns, SamplingParams
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.chains import Chains, PassClock
from slipstream.speculation.drafter import Ask, Computed, Drafter
from slipstream.speculation.rows import Piece, rows_of
from slipstream.speculation.settings import PRIORS, DraftSettings, Drawing, class_of

_WARM_UPS = 4
MOST_CATCHING_UP, SHARED_CATCHING_UP = 512, 64
"""Rows of one pass over tokens that the drafter has not seen: for an answer alone, and while others wait."""


class ModelDrafter(Drafter):
    """A model that drafts one token a pass.

    `vocabulary` are the tokens of a reduced head, ascending; None: all of them.
    """

    name = "model"
    neural = True
    classes = len(PRIORS)
    most = 12

    def __init__(
        self,
        executable: Executable,
        state: str,
        max_rows: int,
        vocabulary: npt.NDArray[np.int32] | None = None,
        drawing: Drawing = "coupled",
    ):
        self.executable, self.state = executable, state
        self._max_rows = max_rows
        self._settings = DraftSettings(vocabulary, drawing)
        self._clock = PassClock()
        self._row = 0.0

    def prior(self, draft_class: int) -> float:
        """From the probability that the drafter gives its token."""
        return PRIORS[draft_class]

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        """One pass after the other over all answers whose drafts are still likely enough to survive."""
        chains = Chains(asks, self.name)
        most = min(MOST_CATCHING_UP if len(asks) == 1 else SHARED_CATCHING_UP, self._max_rows)
        going = [index for index, ask in enumerate(asks) if self._catch_up(ask.answer, most)][: self._max_rows // 2]
        while going:
            drawn = self._pass_over([(asks[index].answer, chains.tokens[index]) for index in going])
            going = [
                index
                for index, (token, probability, proposal) in zip(going, drawn, strict=True)
                if chains.add(index, token, class_of(probability), proposal)
            ]
        return chains.drafts()

    def _catch_up(self, answer: Answer, most: int) -> bool:
        """Compute what the drafter has not seen of an answer but its last token; False if it takes another turn."""
        last = len(answer.tokens) - 1
        answer.drafted = min(answer.drafted, last)  # the last token is run again, to draw from
        count = min(last - answer.drafted, most)
        if count > 1:
            begun = time.perf_counter()
            piece = Piece(answer, answer.drafted, answer.tokens[answer.drafted :][:count])
            self.executable.step(rows_of([piece], "none"), None)
            self._row = (time.perf_counter() - begun) / count
            answer.drafted += count
        return last - answer.drafted <= 1

    def _pass_over(self, going: Sequence[tuple[Answer, list[int]]]) -> list[tuple[int, float, Proposal | None]]:
        """The next token of each (answer, its draft so far), its probability, and what it was drawn from."""
        pieces = []
        for answer, draft in going:
            start = answer.drafted
            known = [*answer.tokens[start:], *draft[max(0, start - len(answer.tokens)) :]]
            pieces.append(Piece(answer, start, known))
        begun = time.perf_counter()
        rows, columns = rows_of(pieces), self._settings.columns(going)
        output = self.executable.step(rows, columns, logits=self._settings.drawing == "own")
        drawn = output.drawn
        assert drawn is not None
        for answer, start, fed, _ in pieces:
            answer.drafted = start + len(fed)
        if len(rows) <= 2 * len(going):
            self._clock.observe(len(going), time.perf_counter() - begun)
        proposals: list[Proposal | None] = [None] * len(going)
        if output.logits is not None:
            proposals = [self._settings.proposal(output.logits[row], columns, row) for row in range(len(going))]
        return list(zip(drawn.token.tolist(), np.exp(drawn.logprobs[:, 0]).tolist(), proposals, strict=True))

    def commit(self, computed: Sequence[Computed]) -> None:
        """Drafts that were not accepted are forgotten."""
        for answer, start, tokens, _ in computed:
            answer.drafted = min(answer.drafted, start + tokens)

    def free(self, answer: Answer, *, learn: bool = True) -> None:
        """Forget an answer."""
        self._settings.forget(answer)

    def pass_seconds(self, answers: int) -> float:
        """As measured lately."""
        return self._clock.seconds(answers)

    def doubt(self) -> None:
        """A pass is priced a little lower, until one is run again."""
        self._clock.doubt()

    def setup_seconds(self, answer: Answer) -> float:
        """Computing what it has not seen."""
        return max(0, len(answer.tokens) - 1 - answer.drafted) * self._row

    def copy_blocks(self, pairs: npt.NDArray[np.int32]) -> None:
        """The target's blocks are copied, and so are the drafter's."""
        self.executable.copy_blocks(pairs)

    def warm_up(self, block: int) -> None:
        """Measure a pass, and a row of many, in a block that nobody holds."""
        slots = [block * BLOCK_SLOTS + position for position in range(BLOCK_SLOTS)]
        numbers = list(range(BLOCK_SLOTS))
        one = Rows.of_columns([[0], [0], [0], slots[:1], [-1]], [0], [[block]])
        many = Rows.of_columns([[0] * BLOCK_SLOTS, numbers, numbers, slots, [n - 1 for n in numbers]], [], [[block]])
        draws = DrawColumns.of([Draw(SamplingParams(temperature=0.0), 0, 0, 1)])
        passes, chunks = [], []
        for _ in range(_WARM_UPS):
            passes.append(self._seconds(one, draws))
            chunks.append(self._seconds(many, None))
        for seconds in sorted(passes)[:2]:
            self._clock.observe(1, seconds)
        self._row = min(chunks) / BLOCK_SLOTS

    def _seconds(self, rows: Rows, draws: DrawColumns | None) -> float:
        begun = time.perf_counter()
        self.executable.step(rows, draws)
        return time.perf_counter() - begun
