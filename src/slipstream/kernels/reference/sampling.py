"""Sampling in numpy: adjust, filter, add noise, take the largest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream.program.noise import gumbel, random_words
from slipstream.program.sampling import DrawColumns, Drawn

Float32Array = npt.NDArray[np.float32]


def adjusted(logits: Float32Array, draws: DrawColumns, row: int) -> Float32Array:
    """A row's logits [vocabulary] after penalties, bias and bans."""
    result = logits.copy()
    span = slice(draws.adjust_start[row], draws.adjust_start[row + 1])
    tokens, (mul, add) = draws.adjust_token[span], draws.adjust_value[:, span]
    old = result[tokens]
    result[tokens] = np.where(old > 0, old / mul, old * mul) + add
    if draws.mask_of[row] >= 0:
        bits = np.unpackbits(draws.masks[draws.mask_of[row]].astype("<u4").view(np.uint8), bitorder="little")
        allowed = np.zeros(len(result), np.bool_)
        allowed[: len(bits)] = bits[: len(result)]
        result[~allowed] = -np.inf
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


def draw(logits: Float32Array, draws: DrawColumns, ids: npt.NDArray[np.int32] | None = None) -> Drawn:
    """Tokens and log-probabilities for logits [rows, vocabulary], or [rows, ids] of some tokens only."""
    rows, vocabulary = logits.shape
    out = Drawn.empty(draws)
    out.tokens.fill(-1)
    out.logprobs.fill(np.nan)
    for row in range(rows):
        top_k, choice, position, stream, wanted = (int(value) for value in draws.ints[:, row])
        temperature, top_p, min_p = draws.floats[:, row]
        scores = adjusted(logits[row], draws, row)
        if temperature > 0:
            scores = scores / temperature
            mask = keep(scores, top_k, float(top_p), float(min_p))
            words = random_words(
                int(draws.seed[row]), choice, position, stream, int(ids[-1]) + 1 if ids is not None else vocabulary
            )
            words = words if ids is None else words[ids]
            scores = np.where(mask, scores + gumbel(words), np.float32(-np.inf))
        out.tokens[row, 0] = scores.argmax()
        if wanted >= 0:
            raw = logits[row].astype(np.float64)
            log_sum = raw.max() + np.log(np.exp(raw - raw.max()).sum())
            best = np.argsort(-logits[row], kind="stable")[:wanted]
            out.tokens[row, 1 : 1 + len(best)] = best
            shown = np.append(out.tokens[row, 0], best)
            out.logprobs[row, : len(shown)] = raw[shown] - log_sum
    if ids is not None:
        out.tokens[:] = np.where(out.tokens >= 0, ids[out.tokens], -1)
    return out
