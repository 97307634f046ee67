"""DSpark (arXiv 2607.05147): one pass over a block of masks drafts several tokens, over the target's hidden states.

The target's hidden states become keys and values at their positions. A block is the last known token and masks after
it; its rows see all of that and one another. The heads in markov.py then make a chain of what the rows say.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slipstream.kernels import Executable
from slipstream.program import BLOCK_SLOTS, Draft, Proposal
from slipstream.program.noise import gumbel_of
from slipstream.program.sampling import STREAM_DRAFT, STREAM_TARGET, Draw, DrawColumns, SamplingParams
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.chains import Chains, PassClock
from slipstream.speculation.drafter import Ask, Needs
from slipstream.speculation.dspark_model import HIDDEN, DSparkConfig
from slipstream.speculation.markov import Choose, MarkovHeads, Slot
from slipstream.speculation.rows import Piece, rows_of
from slipstream.speculation.settings import PRIORS, Drawing, class_of
from slipstream.speculation.tapped import Float32Array, TappedDrafter

LOOKED_AT = 64
"""Likeliest tokens of a slot among which the Markov bias decides."""


class DSparkDrafter(TappedDrafter):
    """Drafts a block at a time."""

    name = "dspark"
    classes = len(PRIORS)
    passes = 1

    def __init__(
        self,
        config: DSparkConfig,
        context: Executable,
        block: Executable,
        heads: MarkovHeads,
        state: str,
        max_rows: int,
        drawing: Drawing = "coupled",
    ):
        """`context` and `block` run the programs of `record_context` and `record_block` over one cache."""
        super().__init__(context, state, len(config.taps) * config.tap_width, 0)
        self.config, self.context, self.block, self.heads = config, context, block, heads
        self.needs = Needs(config.taps)
        self.most, self.drawing, self._max_rows = config.drafts, drawing, max_rows
        self._looking = SamplingParams(temperature=0.0, logprobs=min(LOOKED_AT, config.draft_vocabulary))
        self._draws: dict[int, DrawColumns] = {}
        self._clock = PassClock()

    def prior(self, draft_class: int) -> float:
        """From the confidence head."""
        return PRIORS[draft_class]

    def scratch(self, drafts: int) -> int:
        """A block is run whole however few drafts are wanted; its first row is the last known token."""
        return self.config.block - 1

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        """A block for each answer whose blocks have room for it, all in one pass."""
        drafts: list[Draft | None] = [None] * len(asks)
        going = [i for i, ask in enumerate(asks) if self._has_room(ask.answer)][: self._max_rows // self.config.block]
        if not going:
            return drafts
        begun = time.perf_counter()
        self._take_in([asks[index].answer for index in going])
        masks = [self.config.mask_token] * (self.config.block - 1)
        pieces = []
        for index in going:
            answer = asks[index].answer
            pieces.append(Piece(answer, len(answer.tokens) - 1, [answer.tokens[-1], *masks]))
        output = self.block.step(rows_of(pieces, "all"), self._likeliest(len(going)))
        assert output.drawn is not None
        for place, index in enumerate(going):
            rows = slice(place * self.config.block, (place + 1) * self.config.block)
            drafting = slice(rows.start + self.config.first_slot, rows.stop)
            slots = [
                Slot(logits, places)
                for places, logits in zip(
                    output.drawn.tokens[drafting, 1:], output.drawn.logprobs[drafting, 1:], strict=True
                )
            ]
            drafts[index] = self._chain(asks[index], slots, output.taps[HIDDEN][rows])
        self._clock.observe(len(going), time.perf_counter() - begun)
        return drafts

    def _has_room(self, answer: Answer) -> bool:
        return len(answer.blocks) * BLOCK_SLOTS >= len(answer.tokens) - 1 + self.config.block

    def _likeliest(self, blocks: int) -> DrawColumns:
        """Draws that hand out the likeliest tokens of every row."""
        if blocks not in self._draws:
            self._draws[blocks] = DrawColumns.of([Draw(self._looking, 0, 0, 0)] * (blocks * self.config.block))
        return self._draws[blocks]

    def _chain(self, ask: Ask, slots: Sequence[Slot], hidden: Float32Array) -> Draft | None:
        """Walk the block, and stop where a token is not likely enough to survive."""
        proposals: list[Proposal] = []
        choose = self._chooser(ask.answer, proposals)
        walk = self.heads.walk(ask.answer.tokens[-1], slots, hidden, choose)
        chains = Chains([ask], self.name)
        for place, (token, confidence) in enumerate(zip(walk.tokens, walk.confidences, strict=True)):
            if not chains.add(0, token, class_of(confidence), proposals[place] if proposals else None):
                break
        return chains.drafts()[0]

    def _chooser(self, answer: Answer, proposals: list[Proposal]) -> Choose:
        """Which of a slot's tokens is drafted; those drawn with noise of their own leave what they were drawn from."""
        temperature = answer.params.temperature if self.drawing != "likeliest" else 0.0
        stream = STREAM_DRAFT if self.drawing == "own" else STREAM_TARGET
        first = len(answer.tokens)

        def choose(slot: int, scores: Float32Array, tokens: npt.NDArray[np.int64]) -> int:
            if temperature == 0.0:
                return int(scores.argmax())
            scaled = scores / np.float32(temperature)
            if self.drawing == "own":
                weights = np.exp(scaled - scaled.max())
                proposals.append(Proposal((weights / weights.sum()).astype(np.float32), tokens.astype(np.int32)))
            return int((scaled + gumbel_of(answer.seed, answer.choice, first + slot, stream, tokens)).argmax())

        return choose

    def _take_in(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            waiting = self._waiting[id(answer)]
            while (count := min(waiting.count, self._max_rows)) > 0:
                start = waiting.start
                piece = Piece(answer, start, [0] * count)
                self.context.step(rows_of([piece], "none"), None, inputs=waiting.take(count))
                answer.drafted = start + count

    def pass_seconds(self, answers: int) -> float:
        """As measured lately."""
        return self._clock.seconds(answers)

    def doubt(self) -> None:
        """A pass is priced a little lower, until one is run again."""
        self._clock.doubt()
