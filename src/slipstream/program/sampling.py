"""How the next token is drawn: the settings of a request, and their columns for a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from slipstream.errors import UsageError

MAX_CHOICES = 128
MAX_LOGPROBS = 100
MAX_STOPS = 64
STREAM_TARGET = 0
"""The noise stream a target samples from; drafts, acceptance and residuals have their own."""


def _check(name: str, value: float, low: float, high: float, *, whole: bool = False) -> None:
    """Raise UsageError unless low ≤ value ≤ high."""
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise UsageError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}")
    if math.isnan(value) or not low <= value <= high:
        raise UsageError(f"{name} must be from {low} to {high}, not {value!r}")


@dataclass(frozen=True)
class SamplingParams:
    """A request's sampling settings; a bad value raises UsageError with its name and range.

    Order of effect: repetition penalty, then presence and frequency penalties, logit bias and bans;
    temperature; top-k; top-p; min-p; argmax of what is left plus Gumbel noise. `temperature` 0 is
    argmax. `allowed_tokens` forbids all others. Log-probabilities are the model's own, before any
    of this.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_tokens: tuple[int, ...] = ()
    allowed_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    logprobs: int | None = None
    n: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_k", self.top_k, 0, 1 << 30, whole=True)
        _check("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise UsageError("top_p must be greater than 0")
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token, bias in self.logit_bias.items():
            _check(f"logit_bias[{token}]", bias, -100.0, 100.0)
        _check("min_tokens", self.min_tokens, 0, 1 << 30, whole=True)
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, 1, 1 << 30, whole=True)
            if self.min_tokens > self.max_tokens:
                raise UsageError(f"min_tokens ({self.min_tokens}) is more than max_tokens")
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0, MAX_LOGPROBS, whole=True)
        _check("n", self.n, 1, MAX_CHOICES, whole=True)
        if self.seed is not None:
            _check("seed", self.seed, 0, (1 << 64) - 1, whole=True)
        if len(self.stop) > MAX_STOPS or any(not text for text in self.stop):
            raise UsageError(f"stop must be up to {MAX_STOPS} strings, none of them empty")

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raise UsageError for a token id that the model does not have."""
        for name in ("logit_bias", "banned_tokens", "allowed_tokens", "stop_token_ids"):
            for token in getattr(self, name):
                _check(f"{name} token", token, 0, vocabulary - 1, whole=True)

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Draw:
    """What one logit row needs to be sampled.

    `position` is that of the token to be drawn. `adjust` holds (token, multiplier, addend): a logit is
    multiplied with (or, if positive, divided by) the multiplier, then the addend is added.
    """

    params: SamplingParams
    seed: int
    choice: int
    position: int
    stream: int = STREAM_TARGET
    adjust: Sequence[tuple[int, float, float]] = ()


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """The draws of a step as columns, each [logit rows]; `adjust_*` are in CSR form."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    choice: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]
    stream: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.int32]
    adjust_start: npt.NDArray[np.int32]
    adjust_token: npt.NDArray[np.int32]
    adjust_mul: npt.NDArray[np.float32]
    adjust_add: npt.NDArray[np.float32]
    allowed: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, draws: Sequence[Draw]) -> DrawColumns:
        """Columns from single draws."""
        adjust = [entry for draw in draws for entry in draw.adjust]
        sizes = [len(draw.adjust) for draw in draws]
        return cls(
            np.array([d.params.temperature for d in draws], np.float32),
            np.array([d.params.top_k for d in draws], np.int32),
            np.array([d.params.top_p for d in draws], np.float32),
            np.array([d.params.min_p for d in draws], np.float32),
            np.array([d.seed for d in draws], np.uint64),
            np.array([d.choice for d in draws], np.int32),
            np.array([d.position for d in draws], np.int32),
            np.array([d.stream for d in draws], np.int32),
            np.array([-1 if d.params.logprobs is None else d.params.logprobs for d in draws], np.int32),
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
            np.array([entry[0] for entry in adjust], np.int32),
            np.array([entry[1] for entry in adjust], np.float32),
            np.array([entry[2] for entry in adjust], np.float32),
            tuple(d.params.allowed_tokens for d in draws),
        )

    def __len__(self) -> int:
        return len(self.temperature)


@dataclass(frozen=True, slots=True)
class Drawn:
    """The outcome, each [logit rows]: token ids and, where asked for, log-probabilities.

    `top_tokens` and `top_logprobs` are [logit rows, most asked for]; entries past a row's own number
    are -1. `logprob` is NaN in rows that did not ask.
    """

    token: npt.NDArray[np.int32]
    logprob: npt.NDArray[np.float32]
    top_tokens: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]
