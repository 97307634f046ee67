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
from slipstream.program import BLOCK_SLOTS, Draft, Rows
from slipstream.program.sampling import Draw, DrawColumns, SamplingParams
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.drafter import Ask, Computed, Drafter
from slipstream.speculation.rows import Piece, rows_of
from slipstream.speculation.settings import PRIORS, DraftSettings, class_of

_WARM_UPS = 4
MOST_CATCHING_UP, SHARED_CATCHING_UP = 512, 64
"""Rows of one pass over tokens that the drafter has not seen: for an answer alone, and while others wait."""


class ModelDrafter(Drafter):
    """A model that drafts one token a pass.

    `vocabulary` are the tokens of a reduced head, ascending; None: all of them. With `coupled`, a draft for an answer
    that is sampled is drawn with the answer's own noise, so that like distributions give like tokens; without, it is
    the likeliest token.
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
        *,
        coupled: bool = True,
    ):
        self.executable, self.state = executable, state
        self._max_rows = max_rows
        self._settings = DraftSettings(vocabulary, coupled=coupled)
        self._pass: dict[int, float] = {}
        self._row = 0.0

    def prior(self, draft_class: int) -> float:
        """From the probability that the drafter gives its token."""
        return PRIORS[draft_class]

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        """One pass after the other over all answers whose drafts are still likely enough to survive."""
        tokens: list[list[int]] = [[] for _ in asks]
        classes: list[list[int]] = [[] for _ in asks]
        alive = [1.0] * len(asks)
        most = min(MOST_CATCHING_UP if len(asks) == 1 else SHARED_CATCHING_UP, self._max_rows)
        going = [index for index, ask in enumerate(asks) if self._catch_up(ask.answer, most)][: self._max_rows // 2]
        while going:
            drawn, sure = self._pass_over([(asks[index].answer, tokens[index]) for index in going])
            still = []
            for index, token, probability in zip(going, drawn, sure, strict=True):
                ask = asks[index]
                draft_class = class_of(probability)
                tokens[index].append(token)
                classes[index].append(draft_class)
                alive[index] *= ask.chance(draft_class)
                if len(tokens[index]) < ask.most and alive[index] >= ask.price:
                    still.append(index)
            going = still
        return [
            Draft.chain(drafted, sure, self.name) if drafted else None
            for drafted, sure in zip(tokens, classes, strict=True)
        ]

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

    def _pass_over(self, going: Sequence[tuple[Answer, list[int]]]) -> tuple[list[int], list[float]]:
        """The next token of each (answer, its draft so far), and its probability."""
        pieces, draws = [], []
        for answer, draft in going:
            start = answer.drafted
            known = [*answer.tokens[start:], *draft[max(0, start - len(answer.tokens)) :]]
            pieces.append(Piece(answer, start, known))
            draws.append(self._settings.draw(answer, draft))
        begun = time.perf_counter()
        rows = rows_of(pieces)
        drawn = self.executable.step(rows, DrawColumns.of(draws)).drawn
        assert drawn is not None
        for answer, start, fed, _ in pieces:
            answer.drafted = start + len(fed)
        self._observe(len(going), len(rows), time.perf_counter() - begun)
        return drawn.token.tolist(), np.exp(drawn.logprobs[:, 0]).tolist()

    def commit(self, computed: Sequence[Computed]) -> None:
        """Drafts that were not accepted are forgotten."""
        for answer, start, tokens, _ in computed:
            answer.drafted = min(answer.drafted, start + tokens)

    def free(self, answer: Answer) -> None:
        """Forget an answer."""
        self._settings.forget(answer)

    def pass_seconds(self, answers: int) -> float:
        """As measured lately, or what is known of other numbers."""
        if not self._pass:
            return 0.0
        nearest = min(self._pass, key=lambda count: abs(count - answers))
        return self._pass[nearest]

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
        self._pass[1], self._row = min(passes), min(chunks) / BLOCK_SLOTS

    def _seconds(self, rows: Rows, draws: DrawColumns | None) -> float:
        begun = time.perf_counter()
        self.executable.step(rows, draws)
        return time.perf_counter() - begun

    def _observe(self, answers: int, rows: int, seconds: float) -> None:
        if rows > 2 * answers:
            return
        bucket = 1 << (answers - 1).bit_length()
        self._pass[bucket] = 0.9 * self._pass.get(bucket, seconds) + 0.1 * seconds
