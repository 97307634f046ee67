"""The price of a precision: next-token distributions against the same weights in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.kernels import Executable
from slipstream.program import BLOCK_SLOTS, Row, Rows

Float64Array = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]
Scores = Callable[[list[int], int, int], npt.NDArray[np.float32]]
"""(tokens of one piece, start, end) -> the logits [end - start, vocabulary] of its tokens from start on.

Called with the chunks of a piece in order.
"""
CHUNK = 128


@dataclass(frozen=True, slots=True)
class Quality:
    """Over `tokens` positions: mean KL divergence (nats) from float32, and how often the likeliest agrees.

    `perplexity` and `reference_perplexity` are of the text itself.
    """

    tokens: int
    mean_kl: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float


def scores_of(executable: Executable) -> Scores:
    """The logits of an executable, over a sequence in blocks 0, 1, …"""

    def scores(tokens: list[int], start: int, end: int) -> npt.NDArray[np.float32]:
        rows = [Row(0, tokens[i], i, i, i - start - 1, True) for i in range(start, end)]
        table = list(range(-(-len(tokens) // BLOCK_SLOTS)))
        out = executable.step(Rows.of(rows, [table]), None, logits=True)
        assert out.logits is not None
        return out.logits

    return scores


def _log_softmax(logits: npt.NDArray[np.float32]) -> Float64Array:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _pieces(tokens: list[int], context: int) -> Iterator[list[int]]:
    for start in range(0, len(tokens), context):
        yield tokens[start : start + context]


def compare(
    scores: Scores,
    reference: Scores,
    tokens: list[int],
    context: int,
    progress: Progress | None = None,
) -> Quality:
    """Both over the text in pieces of `context` tokens; the last token of a piece predicts nothing."""
    divergences: list[float] = []
    agreements = 0
    losses = [0.0, 0.0]
    predicted = 0
    for piece in _pieces(tokens, context):
        for start in range(0, len(piece), CHUNK):
            end = min(start + CHUNK, len(piece))
            ours, theirs = (_log_softmax(side(piece, start, end)) for side in (scores, reference))
            divergences.extend((np.exp(theirs) * (theirs - ours)).sum(-1))
            agreements += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            following = piece[start + 1 : start + 1 + len(ours)]
            predicted += len(following)
            for side, logs in enumerate((ours, theirs)):
                losses[side] -= float(logs[np.arange(len(following)), following].sum())
            if progress:
                progress(len(divergences), len(tokens))
    return Quality(
        len(divergences),
        float(np.mean(divergences)),
        agreements / len(divergences),
        float(np.exp(losses[0] / max(predicted, 1))),
        float(np.exp(losses[1] / max(predicted, 1))),
    )
