"""How the next token is drawn: the settings of a request, and their columns for a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from slipstream.errors import UsageError

MAX_CHOICES = 128
MAX_LOGPROBS = 100
MAX_STOPS = 64
STREAM_TARGET, STREAM_DRAFT, STREAM_ACCEPT, STREAM_RESIDUAL, STREAM_BONUS = range(5)
"""Noise streams: what the target draws with; and, where drafts are not verified by what it draws, what they are drawn
with, whether they are kept, what is drawn in their place, and what after the last one.
"""


Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint32]
"""A bit for every token, in words of 32; tokens after the last word are not set."""


def mask_of(tokens: Iterable[int]) -> Mask:
    """The mask with these tokens' bits set."""
    wanted = np.fromiter(tokens, np.int64)
    mask = np.zeros(int(wanted.max(initial=0)) // 32 + 1, np.uint32)
    np.bitwise_or.at(mask, wanted >> 5, (1 << (wanted & 31)).astype(np.uint32))
    return mask


def both(a: Mask, b: Mask) -> Mask:
    """The tokens that two masks allow."""
    count = min(len(a), len(b))
    return a[:count] & b[:count]


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
    argmax. `allowed_tokens` forbids all others; `grammar` (text/grammars.py), all that it does not allow
    next. Log-probabilities are the model's own, before any of this. Special tokens that are `shown` are part of the
    text.
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
    grammar: str = ""
    shown: tuple[int, ...] = ()

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
        for name in ("logit_bias", "banned_tokens", "allowed_tokens", "stop_token_ids", "shown"):
            for token in getattr(self, name):
                _check(f"{name} token", token, 0, vocabulary - 1, whole=True)

    @cached_property
    def allowed_mask(self) -> Mask | None:
        """`allowed_tokens` as a mask, if there are any."""
        return mask_of(self.allowed_tokens) if self.allowed_tokens else None

    @cached_property
    def adjusts(self) -> bool:
        """Whether logits are changed, or tokens forbidden, other than for coming too early."""
        return bool(self.has_penalties or self.logit_bias or self.banned_tokens or self.allowed_tokens)

    @cached_property
    def filters(self) -> bool:
        """Whether tokens are left out for being unlikely beside others."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0)

    @cached_property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Draw:
    """What one logit row needs to be sampled.

    `position` is that of the token to be drawn. `adjust` holds (token, multiplier, addend): a logit is
    multiplied with (or, if positive, divided by) the multiplier, then the addend is added. Only tokens whose bit is set
    in the `mask`, if there is one, can be drawn.
    """

    params: SamplingParams
    seed: int
    choice: int
    position: int
    stream: int = STREAM_TARGET
    adjust: Sequence[tuple[int, float, float]] = ()
    mask: Mask | None = None


def _starts(sizes: list[int]) -> npt.NDArray[np.int32]:
    """Where each row's entries begin, and where the last one's end."""
    starts = np.zeros(len(sizes) + 1, np.int32)
    if any(sizes):
        np.cumsum(sizes, out=starts[1:])
    return starts


def _masks(draws: Sequence[Draw]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]:
    """(which mask each draw has, or -1; the masks)."""
    found = [mask for draw in draws if (mask := draw.mask) is not None]
    which = np.full(len(draws), -1, np.int32)
    if not found:
        return which, _NO_MASKS
    which[[draw.mask is not None for draw in draws]] = np.arange(len(found))
    masks = np.zeros((len(found), max(map(len, found))), np.uint32)
    for row, mask in zip(masks, found, strict=True):
        row[: len(mask)] = mask
    return which, masks


_FIRST = np.zeros(1, np.int32)
_NO_MASKS = np.empty((0, 0), np.uint32)
_NO_TOKENS = np.empty(0, np.int32)
_NO_VALUES = np.empty((2, 0), np.float32)


@lru_cache(maxsize=256)
def _nothing_else(
    rows: int,
) -> tuple[Int32Array, Int32Array, Float32Array, Int32Array, Mask]:
    """The columns of draws that adjust and mask nothing: `adjust_start` to `masks`, which nobody may change."""
    constant = np.zeros(rows + 1, np.int32), np.full(rows, -1, np.int32)
    for column in constant:
        column.flags.writeable = False
    return constant[0], _NO_TOKENS, _NO_VALUES, constant[1], _NO_MASKS


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """The draws of a step as columns, in few pieces so that a backend takes them with few looks.

    `ints` is [5, rows]: top_k, choice, position, stream, logprobs (-1: none). `floats` is [3, rows]:
    temperature, top_p, min_p. `adjust_*` are in CSR form; `adjust_value` is [2, entries]: multiplier,
    addend. `masks` [masks, words] are those of the rows that have one, `mask_of` [rows] says which; -1: none.
    """

    ints: npt.NDArray[np.int32]
    floats: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    adjust_start: npt.NDArray[np.int32]
    adjust_token: npt.NDArray[np.int32]
    adjust_value: npt.NDArray[np.float32]
    mask_of: npt.NDArray[np.int32]
    masks: npt.NDArray[np.uint32]
    most_logprobs: int = 0

    @classmethod
    def of(cls, draws: Sequence[Draw]) -> DrawColumns:
        """Columns from single draws."""
        adjust = [entry for draw in draws for entry in draw.adjust]
        params = [draw.params for draw in draws]
        masked, masks = _masks(draws)
        return cls(
            np.array(
                [
                    [p.top_k for p in params],
                    [draw.choice for draw in draws],
                    [draw.position for draw in draws],
                    [draw.stream for draw in draws],
                    [-1 if p.logprobs is None else p.logprobs for p in params],
                ],
                np.int32,
            ),
            np.array(
                [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]], np.float32
            ),
            np.array([draw.seed for draw in draws], np.uint64),
            _starts([len(draw.adjust) for draw in draws]),
            np.array([entry[0] for entry in adjust], np.int32) if adjust else _NO_TOKENS,
            np.array([[e[1] for e in adjust], [e[2] for e in adjust]], np.float32) if adjust else _NO_VALUES,
            masked,
            masks,
            max((p.logprobs or 0 for p in params), default=0),
        )

    @classmethod
    def plain(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]
    ) -> DrawColumns:
        """Draws that adjust and mask nothing, as most do: the same as of single ones, in fewer steps."""
        count = len(params)
        asked = [-1 if p.logprobs is None else p.logprobs for p in params]
        ints = np.array([[p.top_k for p in params], choices, positions, [STREAM_TARGET] * count, asked], np.int32)
        floats = np.array(
            [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]], np.float32
        )
        return cls(ints, floats, np.array(seeds, np.uint64), *_nothing_else(count), max(*asked, 0))

    @classmethod
    def along(cls, draw: Draw, positions: Sequence[int]) -> DrawColumns:
        """The same draw, which adjusts and masks nothing, at several positions."""
        p, count = draw.params, len(positions)
        asked = -1 if p.logprobs is None else p.logprobs
        same = ([value] * count for value in (p.top_k, draw.choice, draw.stream, asked))
        top_k, choice, stream, logprobs = same
        ints = np.array([top_k, choice, positions, stream, logprobs], np.int32)
        floats = np.array([[p.temperature] * count, [p.top_p] * count, [p.min_p] * count], np.float32)
        return cls(ints, floats, np.array([draw.seed] * count, np.uint64), *_nothing_else(count), p.logprobs or 0)

    def of_row(self, row: int, mask: Mask) -> DrawColumns:
        """One row's draw, from the tokens of a mask only."""
        entries = slice(self.adjust_start[row], self.adjust_start[row + 1])
        if (own := self.mask_of[row]) >= 0:
            mask = both(self.masks[own], mask)
        return DrawColumns(
            np.ascontiguousarray(self.ints[:, row : row + 1]), np.ascontiguousarray(self.floats[:, row : row + 1]),
            self.seed[row : row + 1], self.adjust_start[row : row + 2] - entries.start, self.adjust_token[entries],
            np.ascontiguousarray(self.adjust_value[:, entries]), _FIRST, mask[None], self.most_logprobs,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.seed)

    @property
    def position(self) -> npt.NDArray[np.int32]:
        """Positions of the tokens to be drawn."""
        return self.ints[2]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The outcome. `tokens` and `logprobs` are [logit rows, 1 + most asked for].

    Column 0 is the token that was drawn (its log-probability is NaN in rows that did not ask), the
    others are the likeliest, in order; entries past a row's own number are -1 and NaN.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    @classmethod
    def empty(cls, draws: DrawColumns) -> Drawn:
        """Room for the outcome of `draws`, to be filled."""
        shape = (len(draws), 1 + draws.most_logprobs)
        return cls(np.empty(shape, np.int32), np.empty(shape, np.float32))

    @property
    def token(self) -> npt.NDArray[np.int32]:
        """The drawn tokens [logit rows]."""
        return self.tokens[:, 0]
