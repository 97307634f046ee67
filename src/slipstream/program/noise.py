"""Counter-based noise: a function of (seed, choice, position, stream, token) and nothing else.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt32Array = npt.NDArray[np.uint32]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)


def philox(counter: UInt32Array, key: tuple[int, int]) -> UInt32Array:
    """Ten rounds over counters [n, 4]; random words [n, 4]."""
    c = [counter[:, i].astype(np.uint64) for i in range(4)]
    k0, k1 = key
    for _ in range(10):
        first, second = c[0] * np.uint64(_MULTIPLIERS[0]), c[2] * np.uint64(_MULTIPLIERS[1])
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            second & _LOW,
            (first >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            first & _LOW,
        ]
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack(c, axis=-1).astype(np.uint32)


def random_words(seed: int, choice: int, position: int, stream: int, count: int) -> UInt32Array:
    """32 random bits for each of the tokens 0 … count-1. Four neighbours share a counter."""
    counter = np.empty((-(-count // 4), 4), np.uint32)
    counter[:, 0] = np.arange(len(counter))
    counter[:, 1:] = position, choice, stream
    return philox(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:count]


def gumbel(words: UInt32Array) -> npt.NDArray[np.float32]:
    """Standard Gumbel noise -log(-log(u)) from random bits, accurate where u is close to 1."""
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    return (-np.log(-np.log(u))).astype(np.float32)


def gumbel_of(
    seed: int, choice: int, position: int, stream: int, tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """The noise of some tokens [n] only, as `gumbel(random_words(...))` has it for all."""
    counter = np.empty((len(tokens), 4), np.uint32)
    counter[:, 0] = tokens >> 2
    counter[:, 1:] = position, choice, stream
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return gumbel(words[np.arange(len(tokens)), tokens & 3])
