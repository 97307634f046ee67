"""Answers in OpenAI's form, whole or as events of a stream."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from slipstream.engine.messages import RequestTimings
from slipstream.engine.output import Chunk, TokenLogprob
from slipstream.text import Tokenizer


def usage_of(ended: list[RequestTimings]) -> dict[str, Any]:
    """Tokens of all requests of an answer."""
    prompt, answer = sum(t.prompt_tokens for t in ended), sum(t.generated_tokens for t in ended)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": sum(t.cached_tokens for t in ended)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": (accepted := sum(t.accepted_tokens for t in ended)),
            "rejected_prediction_tokens": sum(t.drafted_tokens for t in ended) - accepted,
        },
    }


@dataclass
class _Choice:
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None
    stop: str | int | None = None


@dataclass
class _Answer:
    """What both kinds share."""

    id: str
    model: str
    tokenizer: Tokenizer
    count: int
    prompt_field: ClassVar[str]
    """The field of the request that the prompt is in."""
    created: int = field(default_factory=lambda: int(time.time()))
    choices: list[_Choice] = field(init=False)

    def __post_init__(self) -> None:
        self.choices = [_Choice() for _ in range(self.count)]

    @property
    def aborted(self) -> bool:
        """Whether a choice was cut off by the request's deadline."""
        return any(choice.reason == "abort" for choice in self.choices)

    def add(self, chunk: Chunk) -> None:
        """Collect a chunk."""
        choice = self.choices[chunk.choice]
        choice.text.append(chunk.text)
        choice.logprobs += chunk.logprobs
        choice.reason, choice.stop = chunk.finish_reason or choice.reason, chunk.stop

    @staticmethod
    def reason(chunks: list[Chunk]) -> str:
        """Why the request ended whose last chunks these are."""
        return next((chunk.finish_reason for chunk in reversed(chunks) if chunk.finish_reason), "stop")

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _token(self, token: int) -> tuple[str, list[int]]:
        data = self.tokenizer.token_bytes[token] if token < len(self.tokenizer.token_bytes) else b""
        return data.decode("utf-8", "replace"), list(data)


class ChatAnswer(_Answer):
    """chat.completion."""

    prompt_field = "messages"

    def report(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                "logprobs": self._logprobs(choice.logprobs),
                "finish_reason": choice.reason,
                "stop_reason": choice.stop,
            }
            for index, choice in enumerate(self.choices)
        ]
        return self._head("chat.completion") | {"choices": choices}

    def opening(self) -> list[dict[str, Any]]:
        """One event per choice that says who speaks."""
        return [self._delta(index, {"role": "assistant", "content": ""}) for index in range(self.count)]

    def event(self, chunk: Chunk) -> dict[str, Any] | None:
        """A chunk as an event; None if it says nothing yet."""
        if not chunk.text and not chunk.finish_reason and not chunk.logprobs:
            return None
        delta = {"content": chunk.text} if chunk.text else {}
        return self._delta(chunk.choice, delta, self._logprobs(chunk.logprobs), chunk.finish_reason)

    def closing(self) -> dict[str, Any]:
        """The event that carries usage."""
        return self._head("chat.completion.chunk") | {"choices": []}

    def _delta(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._head("chat.completion.chunk") | {"choices": [choice]}

    def _logprobs(self, entries: Any) -> dict[str, Any] | None:
        if not entries:
            return None

        def one(token: int, logprob: float) -> dict[str, Any]:
            text, data = self._token(token)
            return {"token": text, "logprob": logprob, "bytes": data}

        return {
            "content": [
                one(e.token, e.logprob) | {"top_logprobs": [one(t, value) for t, value in e.top]} for e in entries
            ]
        }


class CompletionAnswer(_Answer):
    """text_completion."""

    prompt_field = "prompt"

    def report(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            self._choice(index, "".join(choice.text), choice.logprobs, choice.reason, choice.stop)
            for index, choice in enumerate(self.choices)
        ]
        return self._head("text_completion") | {"choices": choices}

    def opening(self) -> list[dict[str, Any]]:
        """Nothing comes before the text."""
        return []

    def event(self, chunk: Chunk) -> dict[str, Any] | None:
        """A chunk as an event; None if it says nothing yet."""
        if not chunk.text and not chunk.finish_reason and not chunk.logprobs:
            return None
        choice = self._choice(chunk.choice, chunk.text, chunk.logprobs, chunk.finish_reason, chunk.stop)
        return self._head("text_completion") | {"choices": [choice]}

    def closing(self) -> dict[str, Any]:
        """The event that carries usage."""
        return self._head("text_completion") | {"choices": []}

    def _choice(
        self, index: int, text: str, entries: Any, reason: str | None, stop: str | int | None
    ) -> dict[str, Any]:
        logprobs = None
        if entries:
            texts = [self._token(entry.token)[0] for entry in entries]
            logprobs = {
                "tokens": texts,
                "token_logprobs": [entry.logprob for entry in entries],
                "top_logprobs": [{self._token(t)[0]: value for t, value in entry.top} for entry in entries],
                "text_offset": [sum(map(len, texts[:i])) for i in range(len(texts))],
            }
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop}
