"""EAGLE-3 (Li et al., arXiv 2503.01840): a small model that reads the target's hidden states, and then its own.

A row is a token with the hidden state of the position before it. For tokens that the target has computed that is the
target's (joined taps); for drafts it is the drafter's own. Rows of drafts are scratch: once tokens are accepted they
are run again with the target's hidden states.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from slipstream.kernels import Executable
from slipstream.kernels.backend import StepOutput, Worth
from slipstream.program import BLOCK_SLOTS, Draft, Proposal, Rows
from slipstream.program.sampling import DrawColumns, Drawn
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.chains import Chains, PassClock
from slipstream.speculation.checkpoint import Int32Array
from slipstream.speculation.drafter import Ask, Needs
from slipstream.speculation.eagle3_model import HIDDEN, Eagle3Config
from slipstream.speculation.rows import Piece, rows_of
from slipstream.speculation.settings import BOUNDS, PRIORS, DraftSettings, Drawing, class_of
from slipstream.speculation.tapped import Float32Array, TappedDrafter

_MANY = 4
"""Rows of one answer in a pass that drafts; where more wait, they are run before."""


class Passed(NamedTuple):
    """What a pass came to, for each of its drawing rows: tokens, the drafter's hidden states [rows, hidden], and what
    the tokens were drawn from.
    """

    drawn: Drawn
    hidden: Float32Array
    proposals: list[Proposal | None]


class Eagle3Drafter(TappedDrafter):
    """Drafts chains."""

    name = "eagle3"
    classes = len(PRIORS)
    most = 8
    shift = 1

    def __init__(
        self,
        config: Eagle3Config,
        over_taps: Executable,
        over_hidden: Executable,
        state: str,
        max_rows: int,
        blocks: int,
        vocabulary: Int32Array | None,
        drawing: Drawing = "coupled",
    ):
        """`over_taps` and `over_hidden` run the programs of `record_eagle3` over the same weights and cache."""
        super().__init__(over_taps, state, len(config.taps) * config.tap_width, blocks)
        self.over_taps, self.over_hidden = over_taps, over_hidden
        self.needs = Needs(config.taps)
        self._max_rows = max_rows
        self._settings = DraftSettings(vocabulary, drawing)
        self._clock, self._begun = PassClock(), PassClock()

    def prior(self, draft_class: int) -> float:
        """From the probability that the drafter gives its token."""
        return PRIORS[draft_class]

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        """One pass after the other over all answers whose drafts are still likely enough to survive."""
        chains = Chains(asks, self.name)
        going = list(range(len(asks)))[: self._max_rows // (2 * _MANY)]
        passed: Passed | None = None
        kept: list[int] = []
        while going:
            begun = time.perf_counter()
            answers = [asks[index].answer for index in going]
            first = passed is None  # takes in what waits, however much that is
            if passed is None:
                passed = self._first(answers)
            else:
                passed = self._next(answers, [chains.tokens[index] for index in going], passed.hidden[kept])
            chances = np.exp(passed.drawn.logprobs[:, 0]).tolist()
            tokens = passed.drawn.token.tolist()
            kept = [
                place
                for place, index in enumerate(going)
                if chains.add(index, tokens[place], class_of(chances[place]), passed.proposals[place])
            ]
            (self._begun if first else self._clock).observe(len(going), time.perf_counter() - begun)
            going = [going[place] for place in kept]
            if len(asks) == len(going) == 1 and self._settings.drawing != "own" and asks[0].answer.draws_plainly:
                self._follow(asks[0], chains, passed.hidden)
                break
        return chains.drafts()

    def _follow(self, ask: Ask, chains: Chains, hidden: Float32Array) -> None:
        """The rest of the only chain, in one call: a pass takes a small drafter little longer than Python around it."""
        begun, answer, draft = time.perf_counter(), ask.answer, chains.tokens[0]
        start, most = len(answer.tokens) - 1 + len(draft), ask.most - len(draft)
        slots = np.array([answer.slot(start + place) for place in range(most)], np.int32)
        worth = Worth(BOUNDS, np.array([ask.chance(c) for c in range(self.classes)]), chains.alive[0], ask.price)
        draws = self._settings.columns([(answer, draft)])
        drawn = self.over_hidden.follow(rows_of([Piece(answer, start, draft[-1:])]), draws, hidden, slots, worth)
        chances = np.exp(drawn.logprobs[:, 0]).tolist()
        for token, chance in zip(drawn.token.tolist(), chances, strict=True):
            chains.add(0, token, class_of(chance), None)
        self._clock.observe(1, (time.perf_counter() - begun) / len(chances))

    def _first(self, answers: Sequence[Answer], likeliest: int = 0) -> Passed:
        """Take in what waits, and draw after the last known token of each."""
        self._take_in([a for a in answers if self._waiting[id(a)].count > _MANY], keep=1)
        pieces, inputs = [], []
        for answer in answers:
            waiting = self._waiting[id(answer)]
            if not waiting.count:  # everything was taken in; the last row is run again, to draw after it
                waiting.again()
            start = waiting.start + 1
            count = self._rows_known(answer)
            inputs.append(waiting.take(count))
            pieces.append(Piece(answer, start, answer.tokens[start : start + count]))
            answer.drafted = start + count
        draws = self._settings.columns([(answer, []) for answer in answers], likeliest)
        joined = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
        return self._run(self.over_taps, rows_of(pieces), draws, joined)

    def _next(self, answers: Sequence[Answer], drafts: Sequence[list[int]], hidden: Float32Array) -> Passed:
        """Run the last token of each draft with the drafter's own hidden state."""
        pieces = [Piece(a, len(a.tokens) - 1 + len(d), d[-1:]) for a, d in zip(answers, drafts, strict=True)]
        draws = self._settings.columns(list(zip(answers, drafts, strict=True)))
        return self._run(self.over_hidden, rows_of(pieces), draws, hidden)

    def _run(self, executable: Executable, rows: Rows, draws: DrawColumns, inputs: Float32Array) -> Passed:
        output: StepOutput = executable.step(rows, draws, inputs=inputs, logits=self._settings.drawing == "own")
        assert output.drawn is not None
        proposals: list[Proposal | None] = [None] * len(draws)
        if output.logits is not None:
            proposals = [self._settings.proposal(output.logits[row], draws, row) for row in range(len(draws))]
        return Passed(output.drawn, output.taps[HIDDEN][rows.logit_rows], proposals)

    def _take_in(self, answers: Sequence[Answer], keep: int = 0) -> None:
        """Take in what waits but for the last `keep` rows."""
        for answer in answers:
            waiting = self._waiting[id(answer)]
            while (count := min(self._rows_known(answer) - keep, self._max_rows)) > 0:
                start = waiting.start + 1
                piece = Piece(answer, start, answer.tokens[start : start + count])
                self.over_taps.step(rows_of([piece], "none"), None, inputs=waiting.take(count))
                answer.drafted = start + count

    def _rows_known(self, answer: Answer) -> int:
        """Rows that can be run: their hidden states wait, their tokens are known, and their slots are the answer's."""
        waiting = self._waiting[id(answer)]
        return min(waiting.count, min(len(answer.tokens), len(answer.blocks) * BLOCK_SLOTS) - waiting.start - 1)

    def pass_seconds(self, answers: int) -> float:
        """As measured lately."""
        return self._clock.seconds(answers)

    def begin_seconds(self, answers: int) -> float:
        """As measured lately, for as many rows as wait as a rule."""
        return max(0.0, self._begun.seconds(answers) - self._clock.seconds(answers))

    def doubt(self) -> None:
        """A pass is priced a little lower, until one is run again."""
        self._clock.doubt()
        self._begun.doubt()

    def free(self, answer: Answer, *, learn: bool = True) -> None:
        """Forget an answer."""
        super().free(answer)
        self._settings.forget(answer)
