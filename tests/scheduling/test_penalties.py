"""Penalties: the logits that a sequence's next token is drawn from, by their formulas."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.kernels.reference.sampling import adjusted
from slipstream.program import KVFormat, Namespace
from slipstream.program.sampling import DrawColumns, SamplingParams
from slipstream.scheduling import Sequence

PROMPT, ANSWER, DRAFT = [0, 1, 1], [2, 3, 3, 0], [3, 4]
LOGITS = np.array([3.0, -3.0, 4.0, -4.0, 5.0, -5.0, 0.0, 1.0], np.float32)


def answering(params: SamplingParams) -> Sequence:
    sequence = Sequence(0, 0, [*PROMPT], len(PROMPT), params, 0, frozenset(), 100, Namespace("", "", KVFormat.BF16))
    for token in ANSWER:
        sequence.append(token)
    return sequence


@pytest.mark.parametrize(
    ("params", "next_token", "after_draft"),
    [
        # What was said, by the prompt too, counts once: positive logits are divided, negative ones multiplied.
        (
            SamplingParams(repetition_penalty=2.0),
            [1.5, -6.0, 2.0, -8.0, 5.0, -5.0, 0.0, 1.0],
            [1.5, -6.0, 2.0, -8.0, 2.5, -5.0, 0.0, 1.0],
        ),
        (
            SamplingParams(repetition_penalty=0.5),
            [6.0, -1.5, 8.0, -2.0, 5.0, -5.0, 0.0, 1.0],
            [6.0, -1.5, 8.0, -2.0, 10.0, -5.0, 0.0, 1.0],
        ),
        # Of the answer only, once.
        (
            SamplingParams(presence_penalty=0.5),
            [2.5, -3.0, 3.5, -4.5, 5.0, -5.0, 0.0, 1.0],
            [2.5, -3.0, 3.5, -4.5, 4.5, -5.0, 0.0, 1.0],
        ),
        (
            SamplingParams(presence_penalty=-2.0),
            [5.0, -3.0, 6.0, -2.0, 5.0, -5.0, 0.0, 1.0],
            [5.0, -3.0, 6.0, -2.0, 7.0, -5.0, 0.0, 1.0],
        ),
        # Of the answer only, as often as it was said.
        (
            SamplingParams(frequency_penalty=0.75),
            [2.25, -3.0, 3.25, -5.5, 5.0, -5.0, 0.0, 1.0],
            [2.25, -3.0, 3.25, -6.25, 4.25, -5.0, 0.0, 1.0],
        ),
        # All: the repetition penalty first, which the others do not scale with, and a bias on top.
        (
            SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.75, logit_bias={3: 1.0}),
            [0.25, -6.0, 0.75, -9.0, 5.0, -5.0, 0.0, 1.0],
            [0.25, -6.0, 0.75, -9.75, 1.25, -5.0, 0.0, 1.0],
        ),
    ],
)
def test_formulas(params: SamplingParams, next_token: list[float], after_draft: list[float]) -> None:
    sequence = answering(params)
    draws = DrawColumns.of([sequence.draw(), sequence.draw_after(DRAFT)])
    assert adjusted(LOGITS, draws, 0).tolist() == next_token
    assert adjusted(LOGITS, draws, 1).tolist() == after_draft
