"""What a sequence says: text without half characters or stop strings, log-probabilities, the reason it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from slipstream.scheduling import Sequence
from slipstream.text import Detokenizer, StopStrings, Tokenizer

FinishReason = Literal["stop", "length", "abort"]


class TokenLogprob(NamedTuple):
    """Log-probability of a token, and of the likeliest ones at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Chunk(NamedTuple):
    """News of one choice: new text, the tokens behind it, and, in the last chunk, why it ended."""

    request: int
    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | int | None = None


@dataclass
class OutputState:
    """Turns a sequence's tokens into chunks. Tokens after a stop are never seen here."""

    sequence: Sequence
    tokenizer: Tokenizer
    detokenizer: Detokenizer = field(init=False)
    stops: StopStrings = field(init=False)

    def __post_init__(self) -> None:
        self.detokenizer = self.tokenizer.detokenizer()
        self.stops = StopStrings(self.sequence.params.stop)

    def add(self, token: int, logprob: TokenLogprob | None) -> Chunk:
        """Account for a token that was just appended to the sequence."""
        sequence, params = self.sequence, self.sequence.params
        logprobs = (logprob,) if logprob else ()

        def chunk(text: str, reason: FinishReason | None = None, stop: str | int | None = None) -> Chunk:
            return Chunk(sequence.request, sequence.choice, text, (token,), logprobs, reason, stop)

        enough = sequence.generated >= params.min_tokens
        if enough and token in params.stop_token_ids:
            return chunk(self.stops.finish() + self.detokenizer.finish(), "stop", token)
        if enough and token in sequence.eos and not params.ignore_eos:
            return chunk(self.stops.finish() + self.detokenizer.finish(), "stop")
        text, stop = self.stops.add(self.detokenizer.add(token))
        if stop is not None and enough:
            return chunk(text, "stop", stop)
        if len(sequence.tokens) >= sequence.limit:
            rest, stop = self.stops.add(self.detokenizer.finish())
            text += rest if stop is not None else rest + self.stops.finish()
            return chunk(text, "length" if stop is None else "stop", stop)
        return chunk(text)
