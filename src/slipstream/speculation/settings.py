"""How a neural drafter draws its tokens, and how sure it is of one."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from slipstream.program import Proposal
from slipstream.program.sampling import STREAM_DRAFT, Draw, DrawColumns, Mask, SamplingParams, mask_of
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.rejection import distribution

Float32Array = npt.NDArray[np.float32]

CONFIDENCE = (0.2, 0.4, 0.6, 0.8, 0.9, 0.97)
"""Probabilities at which classes of confidence begin, after the first."""
BOUNDS = np.array(CONFIDENCE)
PRIORS = (0.1, 0.25, 0.45, 0.6, 0.75, 0.87, 0.95)


def class_of(probability: float) -> int:
    """The class of confidence of a token to which the drafter gives a probability."""
    return bisect.bisect_right(CONFIDENCE, probability)


Drawing = Literal["coupled", "likeliest", "own"]
"""How drafts for an answer that is sampled are drawn. With the answer's own noise (Gumbel coupling), so that like
distributions give like tokens; as the likeliest token; or, for verification by rejection, with noise of their own, and
with the distribution that they were drawn from.
"""


class DraftSettings:
    """An answer's sampling settings as its drafts are drawn with them.

    `vocabulary` are the tokens that the drafter's head knows, ascending; None: all. Penalties and biases count for
    drafts as they do for the answer.
    """

    def __init__(self, vocabulary: npt.NDArray[np.int32] | None, drawing: Drawing = "coupled"):
        self.drawing = drawing
        self.ids = vocabulary
        self._vocabulary: list[int] | None = None if vocabulary is None else vocabulary.tolist()
        self._params: dict[tuple[int, int], SamplingParams] = {}
        self._columns: dict[tuple[int, int], DrawColumns] = {}

    def columns(self, wanted: Sequence[tuple[Answer, list[int]]], likeliest: int = 0) -> DrawColumns:
        """How the tokens after drafts of answers are drawn, in columns that hold until the next call."""
        if len(wanted) > 1 or not wanted[0][0].draws_plainly:
            return DrawColumns.of([self.draw(answer, draft, likeliest) for answer, draft in wanted])
        ((answer, draft),) = wanted
        columns = self._columns.get((id(answer), likeliest))
        if columns is None:
            columns = self._columns[id(answer), likeliest] = DrawColumns.of([self.draw(answer, [], likeliest)])
        columns.position[0] = answer.length + len(draft)
        return columns

    def draw(self, answer: Answer, draft: list[int], likeliest: int = 0) -> Draw:
        """How the token after a draft is drawn; with the `likeliest` tokens besides."""
        draw = answer.draw_after(draft)
        stream = STREAM_DRAFT if self.drawing == "own" else draw.stream
        params, adjust = self._params_of(answer, likeliest), self._known(draw.adjust)
        return replace(draw, params=params, adjust=adjust, stream=stream, mask=self._allowed(draw.mask))

    def proposal(self, logits: Float32Array, draws: DrawColumns, row: int) -> Proposal | None:
        """What a token was drawn from, given the logits of the head's tokens; None for the only one there could be."""
        if self.drawing != "own" or draws.floats[0, row] == 0.0:
            return None
        return Proposal(distribution(logits, draws, row).astype(np.float32), self.ids)

    def _params_of(self, answer: Answer, likeliest: int) -> SamplingParams:
        params = self._params.get((id(answer), likeliest))
        if params is None:
            changes: dict[str, Any] = {
                "logprobs": likeliest, "logit_bias": {}, "banned_tokens": (), "allowed_tokens": (), "grammar": "",
            }  # fmt: skip
            if self.drawing == "likeliest":
                changes["temperature"] = 0.0
            params = self._params[id(answer), likeliest] = replace(answer.params, **changes)
        return params

    def _known(self, adjust: Sequence[tuple[int, float, float]]) -> Sequence[tuple[int, float, float]]:
        """Adjustments by row of the head, of the tokens that it knows."""
        ids = self._vocabulary
        if ids is None or not adjust:
            return adjust
        places = [(bisect.bisect_left(ids, token), token, m, a) for token, m, a in adjust]
        return [(at, m, a) for at, token, m, a in places if at < len(ids) and ids[at] == token]

    def _allowed(self, mask: Mask | None) -> Mask | None:
        """A mask by row of the head; none where the head knows nothing that is allowed."""
        if mask is None or self.ids is None:
            return mask
        within = self.ids[self.ids >> 5 < len(mask)]  # ascending: the first rows
        rows = np.flatnonzero(mask[within >> 5] >> (within & 31).astype(np.uint32) & 1)
        return mask_of(rows) if len(rows) else None

    def forget(self, answer: Answer) -> None:
        """Forget an answer."""
        for key in [key for key in self._params if key[0] == id(answer)]:
            del self._params[key]
            self._columns.pop(key, None)
