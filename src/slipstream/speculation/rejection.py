"""Rejection: the classical rule (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

What comes out has the distribution of plain decoding, though not its tokens. A draft x that was drawn from q is kept
with probability min(1, p(x) / q(x)); otherwise p becomes the normalised positive part of p - q, and the next candidate,
if the draft is a tree, is tried against that (SpecInfer, arXiv 2305.09781). A draft that was not drawn, but is the only
one that could be proposed, is q = 1 at its token. p is the target's distribution after all of the request's settings.
Accepting, drawing from what is left, and drawing after the last draft have noise of their own: sharing any would bend
the distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slipstream.kernels.reference.sampling import adjusted, keep
from slipstream.program import Draft, Proposal
from slipstream.program.draft import ROOT
from slipstream.program.noise import gumbel, random_words
from slipstream.program.sampling import STREAM_ACCEPT, STREAM_BONUS, STREAM_RESIDUAL, DrawColumns
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.verification import ExactVerification, Verdict

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


def distribution(logits: Float32Array, draws: DrawColumns, row: int) -> Float64Array:
    """What a row's token is drawn from, after penalties, temperature and filters; [vocabulary], adds up to 1."""
    temperature, top_p, min_p = (float(value) for value in draws.floats[:, row])
    scores = adjusted(logits, draws, row) / np.float32(temperature)
    if scores.max() == -np.inf:  # a grammar has ended, and the answer with it: nobody looks at what is drawn
        return np.full(len(scores), 1.0 / len(scores))
    mask = keep(scores, int(draws.ints[0, row]), top_p, min_p)
    weights = np.where(mask, np.exp(scores.astype(np.float64) - float(scores.max())), 0.0)
    return weights / weights.sum()


def pick(p: Float64Array, seed: int, choice: int, position: int, stream: int) -> int:
    """A token drawn from p [vocabulary] with the noise of a stream."""
    noise = gumbel(random_words(seed, choice, position, stream, len(p))).astype(np.float64)
    with np.errstate(divide="ignore"):
        return int((np.log(p) + noise).argmax())


class RejectionVerification:
    """Equal to plain decoding in distribution; at temperature 0 it is the exact rule."""

    wants_logits = True

    def __init__(self) -> None:
        self._exact = ExactVerification()

    def verify(self, answer: Answer, draft: Draft, drawn: Sequence[int], logits: Float32Array | None) -> Verdict:
        """Follow the draft from candidate to candidate. `logits` are [1 + drafts, vocabulary]."""
        if answer.params.temperature == 0.0:
            return self._exact.verify(answer, draft, drawn, logits)
        assert logits is not None
        draws = DrawColumns.of(answer.draws(draft))
        held: list[int] = []
        tokens: list[int] = []
        at = ROOT
        while True:
            p = distribution(logits[at + 1], draws, at + 1)
            position = answer.length + len(tokens)
            children = [index for index, parent in enumerate(draft.parents) if parent == at]
            accepted, p = self._try(answer, draft, children, p, position)
            if accepted is None:
                stream = STREAM_RESIDUAL if children else STREAM_BONUS
                tokens.append(pick(p, answer.seed, answer.choice, position, stream))
                return Verdict(held, tokens)
            held.append(accepted)
            tokens.append(draft.tokens[accepted])
            at = accepted

    def _try(
        self, answer: Answer, draft: Draft, children: Sequence[int], p: Float64Array, position: int
    ) -> tuple[int | None, Float64Array]:
        """Try candidates for one place in order; returns the one that is kept, or what to draw from instead."""
        words = random_words(answer.seed, answer.choice, position, STREAM_ACCEPT, max(len(children), 1))
        for child, word in zip(children, words, strict=False):
            token = draft.tokens[child]
            chance, left = _against(p, token, draft.proposals[child] if draft.proposals is not None else None)
            if (float(word) + 0.5) * 2.0**-32 < chance:
                return child, p
            p = left
        return None, p


def _against(p: Float64Array, token: int, proposal: Proposal | None) -> tuple[float, Float64Array]:
    """The chance that a candidate is kept, and what is left of p if it is not."""
    if proposal is None:
        chance, left = float(p[token]), p.copy()
        left[token] = 0.0
    else:
        q = proposal.dense(len(p))
        chance, left = min(1.0, float(p[token]) / max(float(q[token]), 1e-300)), np.maximum(p - q, 0.0)
    total = left.sum()
    return (chance, left / total) if total > 0 else (1.0, p)
