"""DSpark (arXiv 2607.05147): one pass over a block of masks drafts several tokens, over the target's hidden states.

The target's hidden states become keys and values at their positions. A block is the last known token and masks after
it; its rows see all of that and one another. The heads in markov.py then make a chain of what the rows say.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from slipstream.kernels import Executable
from slipstream.program import BLOCK_SLOTS, Draft
from slipstream.program.noise import gumbel_of
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.drafter import Ask, Needs
from slipstream.speculation.dspark_model import HIDDEN, DSparkConfig
from slipstream.speculation.markov import Choose, MarkovHeads
from slipstream.speculation.rows import Piece, rows_of
from slipstream.speculation.settings import PRIORS, class_of
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
        *,
        coupled: bool = True,
    ):
        """`context` and `block` run the programs of `record_context` and `record_block` over one cache."""
        super().__init__(context, state, len(config.taps) * config.tap_width, 0)
        self.config, self.context, self.block, self.heads = config, context, block, heads
        self.needs = Needs(config.taps, embedding=True, head=True)
        self.most, self.coupled, self._max_rows = config.drafts, coupled, max_rows
        self._seconds = 0.0

    def prior(self, draft_class: int) -> float:
        """From the confidence head."""
        return PRIORS[draft_class]

    def scratch(self, drafts: int) -> int:
        """A block is run whole however few drafts are wanted; its first row is the last known token."""
        return self.config.block - 1

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        """A block for each answer whose blocks have room for it, all in one pass."""
        drafts: list[Draft | None] = [None] * len(asks)
        begun = time.perf_counter()
        going = [i for i, ask in enumerate(asks) if self._has_room(ask.answer)][: self._max_rows // self.config.block]
        if not going:
            return drafts
        self._take_in([asks[index].answer for index in going])
        masks = [self.config.mask_token] * (self.config.block - 1)
        pieces = []
        for index in going:
            answer = asks[index].answer
            pieces.append(Piece(answer, len(answer.tokens) - 1, [answer.tokens[-1], *masks]))
        output = self.block.step(rows_of(pieces, "all"), None, logits=True)
        assert output.logits is not None
        for place, index in enumerate(going):
            rows = slice(place * self.config.block, (place + 1) * self.config.block)
            drafts[index] = self._chain(asks[index], output.logits[rows], output.taps[HIDDEN][rows])
        seconds = time.perf_counter() - begun
        self._seconds = 0.9 * (self._seconds or seconds) + 0.1 * seconds
        return drafts

    def _has_room(self, answer: Answer) -> bool:
        return len(answer.blocks) * BLOCK_SLOTS >= len(answer.tokens) - 1 + self.config.block

    def _chain(self, ask: Ask, logits: Float32Array, hidden: Float32Array) -> Draft | None:
        """Walk the block, and stop where a token is not likely enough to survive."""
        answer = ask.answer
        walk = self.heads.walk(answer.tokens[-1], logits, hidden, self._chooser(answer), LOOKED_AT)
        tokens: list[int] = []
        classes: list[int] = []
        alive = 1.0
        for token, confidence in zip(walk.tokens[: ask.most], walk.confidences, strict=False):
            classes.append(class_of(confidence))
            alive *= ask.chance(classes[-1])
            if alive < ask.price and tokens:
                break
            tokens.append(token)
        return Draft.chain(tokens, classes[: len(tokens)], self.name) if tokens else None

    def _chooser(self, answer: Answer) -> Choose:
        """The likeliest token, or, coupled, the likeliest with the answer's own noise."""
        temperature = answer.params.temperature if self.coupled else 0.0
        first = len(answer.tokens)

        def choose(slot: int, scores: Float32Array, tokens: np.ndarray) -> int:
            if temperature > 0:
                noise = gumbel_of(answer.seed, answer.choice, first + slot, 0, tokens)
                return int((scores / np.float32(temperature) + noise).argmax())
            return int(scores.argmax())

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
        return self._seconds
