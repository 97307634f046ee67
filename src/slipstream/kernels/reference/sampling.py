"""Sampling in numpy: adjust, filter, add noise, take the largest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream.kernels.reference.noise import gumbel, random_words
from slipstream.program.sampling import DrawColumns, Drawn

Float32Array = npt.NDArray[np.float32]


def adjusted(logits: Float32Array, draws: DrawColumns, row: int) -> Float32Array:
    """A row's logits [vocabulary] after penalties, bias and bans."""
    result = logits.copy()
    span = slice(draws.adjust_start[row], draws.adjust_start[row + 1])
    tokens, mul = draws.adjust_token[span], draws.adjust_mul[span]
    old = result[tokens]
    result[tokens] = np.where(old > 0, old / mul, old * mul) + draws.adjust_add[span]
    if draws.allowed[row]:
        kept = np.full_like(result, -np.inf)
        allowed = list(draws.allowed[row])
        kept[allowed] = result[allowed]
        return kept
    return result


def keep(scaled: Float32Array, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.bool_]:
    """Which tokens [vocabulary] survive top-k, top-p and min-p; ties go to the lower id."""
    order = np.argsort(-scaled, kind="stable")
    if 0 < top_k < len(order):
        order = order[:top_k]
    weights = np.exp(scaled[order].astype(np.float64) - float(scaled[order[0]]))
    if top_p < 1.0:
        below = np.cumsum(weights) - weights < top_p * weights.sum()
        order, weights = order[below], weights[below]
    order = order[weights >= min_p]
    mask = np.zeros(len(scaled), np.bool_)
    mask[order] = True
    return mask


def draw(logits: Float32Array, draws: DrawColumns) -> Drawn:
    """Tokens and log-probabilities for logits [rows, vocabulary]."""
    rows, vocabulary = logits.shape
    most = max(0, int(draws.logprobs.max(initial=0)))
    token = np.empty(rows, np.int32)
    logprob = np.full(rows, np.nan, np.float32)
    top_tokens = np.full((rows, most), -1, np.int32)
    top_logprobs = np.full((rows, most), np.nan, np.float32)
    for row in range(rows):
        scores = adjusted(logits[row], draws, row)
        if draws.temperature[row] > 0:
            scores = scores / draws.temperature[row]
            mask = keep(scores, int(draws.top_k[row]), float(draws.top_p[row]), float(draws.min_p[row]))
            words = random_words(
                int(draws.seed[row]),
                int(draws.choice[row]),
                int(draws.position[row]),
                int(draws.stream[row]),
                vocabulary,
            )
            scores = np.where(mask, scores + gumbel(words), np.float32(-np.inf))
        token[row] = scores.argmax()
        wanted = int(draws.logprobs[row])
        if wanted >= 0:
            raw = logits[row].astype(np.float64)
            log_sum = raw.max() + np.log(np.exp(raw - raw.max()).sum())
            logprob[row] = raw[token[row]] - log_sum
            best = np.argsort(-logits[row], kind="stable")[:wanted]
            top_tokens[row, :wanted] = best
            top_logprobs[row, :wanted] = raw[best] - log_sum
    return Drawn(token, logprob, top_tokens, top_logprobs)
