"""What a sequence says: text without half characters or stop strings, log-probabilities, the reason it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.program.sampling import Drawn
from slipstream.scheduling import Sequence
from slipstream.text import Detokenizer, StopStrings, Tokenizer

Float32Array = npt.NDArray[np.float32]
FinishReason = Literal["stop", "length", "abort"]


class TokenLogprob(NamedTuple):
    """Log-probability of a token, and of the likeliest ones at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """News of one choice: new text, the tokens behind it, and, in the last chunk, why it ended."""

    request: int
    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | int | None = None


@dataclass(slots=True)
class OutputState:
    """Turns a sequence's tokens into chunks. Tokens after a stop are never seen here."""

    sequence: Sequence
    tokenizer: Tokenizer
    detokenizer: Detokenizer = field(init=False)
    stops: StopStrings | None = field(init=False)
    ends: frozenset[int] = field(init=False)
    simple: bool = field(init=False)
    """Whether a token is just appended, and its text added, unless it ends the answer."""

    def __post_init__(self) -> None:
        params = self.sequence.params
        self.detokenizer = self.tokenizer.detokenizer(params.shown)
        self.stops = StopStrings(params.stop) if params.stop else None
        self.simple = self.stops is None and self.sequence.constraint is None and not params.has_penalties
        self.ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.ends |= self.sequence.eos

    def add(self, token: int, logprobs: tuple[TokenLogprob, ...] = ()) -> Chunk:
        """Account for a token that was just appended to the sequence."""
        sequence = self.sequence
        if self.simple and token not in self.ends and len(sequence.tokens) < sequence.limit:
            return Chunk(sequence.request, sequence.choice, self.detokenizer.add(token), (token,), logprobs)
        params = sequence.params
        enough = not params.min_tokens or sequence.generated >= params.min_tokens
        constraint = sequence.constraint
        over = constraint is not None and constraint.over
        failed = constraint is not None and constraint.failed
        reason: FinishReason | None = None
        stop: str | int | None = None
        if token in self.ends and (enough or over):
            text, reason = self.detokenizer.finish(), "length" if failed else "stop"
            stop = token if token in params.stop_token_ids else None
        else:
            text = self.detokenizer.add(token)
            if over or len(sequence.tokens) >= sequence.limit:
                text, reason = text + self.detokenizer.finish(), "stop" if over and not failed else "length"
        if self.stops is not None and enough:
            text, hit = self.stops.add(text)
            if hit is not None:
                reason, stop = "stop", hit
            elif reason is not None:
                text += self.stops.finish()
        return Chunk(sequence.request, sequence.choice, text, (token,), logprobs, reason, stop)


def logprobs_of(sequence: Sequence, drawn: Drawn, index: int) -> tuple[TokenLogprob, ...]:
    """What a draw says of its token and of the likeliest ones, as far as they were asked for."""
    count = 1 + (sequence.params.logprobs or 0)
    tokens, values = drawn.tokens[index, :count], drawn.logprobs[index, :count]
    pairs = [(int(t), float(v)) for t, v in zip(tokens, values, strict=True)]
    return (TokenLogprob(*pairs[0], tuple(pairs[1:])),)


def logprob_of(token: int, logits: Float32Array) -> float:
    """A token's log-probability by a row's logits [vocabulary]."""
    scores = logits.astype(np.float64)
    return float(scores[token] - scores.max() - np.log(np.exp(scores - scores.max()).sum()))
