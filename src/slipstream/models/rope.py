"""Rotary position embeddings: inverse frequencies and attention factor for every scaling in use.

Linear: Chen et al. 2023 (2306.15595). YaRN: Peng et al. 2023 (2309.00071). LongRoPE: Ding et al. 2024
(2402.13753). llama3: the rule published with Llama 3.1's code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
ScalingKind = Literal["none", "linear", "llama3", "yarn", "longrope", "divisors"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding of the first `dim` numbers of a head, base `theta`, with its scaling.

    `original` is the context the model was first trained with. `divisors` (one per frequency) are
    what a GGUF file stores instead of a rule; longrope has `short_factors` and `long_factors`.
    """

    dim: int
    theta: float = 10_000.0
    kind: ScalingKind = "none"
    factor: float = 1.0
    original: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def table(self, max_len: int) -> tuple[Float32Array, float]:
        """(inverse frequencies [dim / 2], factor on sine and cosine) for contexts up to `max_len`."""
        exponent = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        base: Float32Array = (1.0 / np.float32(self.theta) ** exponent).astype(np.float32)
        match self.kind:
            case "none":
                return base, 1.0
            case "linear":
                return (base / np.float32(self.factor)).astype(np.float32), 1.0
            case "divisors":
                return _divided(base, self.divisors), 1.0
            case "llama3":
                return self._llama3(base), 1.0
            case "yarn":
                return self._yarn(base), self._yarn_factor()
            case "longrope":
                chosen = self.long_factors if max_len > self.original else self.short_factors
                return _divided(base, chosen), self._longrope_factor()

    def _llama3(self, base: Float32Array) -> Float32Array:
        wavelength = 2 * math.pi / base
        span = self.high_freq_factor - self.low_freq_factor
        smooth = (self.original / wavelength - self.low_freq_factor) / span
        blended = (1 - smooth) * base / self.factor + smooth * base
        result = np.where(wavelength > self.original / self.low_freq_factor, base / self.factor, base)
        medium = (wavelength <= self.original / self.low_freq_factor) & (
            wavelength >= self.original / self.high_freq_factor
        )
        return np.where(medium, blended, result).astype(np.float32)

    def _yarn(self, base: Float32Array) -> Float32Array:
        def dimension(rotations: float) -> float:
            turns = self.original / (rotations * 2 * math.pi)
            return self.dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((np.arange(self.dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
        return (base / self.factor * ramp + base * (1 - ramp)).astype(np.float32)

    def _yarn_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor

        def scale(mscale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)

    def _longrope_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original))


def _divided(base: Float32Array, divisors: tuple[float, ...]) -> Float32Array:
    return np.divide(base, np.array(divisors, np.float32), dtype=np.float32)
