"""Answers: what was said, taken apart, in the form of OpenAI's chat and completions, whole or as events of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

import msgspec

from slipstream.engine.messages import RequestTimings
from slipstream.engine.output import Chunk, TokenLogprob
from slipstream.serving.errors import ApiError
from slipstream.serving.tools import NOTHING, Reading
from slipstream.text import Tokenizer
from slipstream.text.parsers import CallArguments, CallBegins, Event, OutputParser, Said, Thought


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


def timings_of(ended: list[RequestTimings], *, timed: bool) -> dict[str, Any]:
    """What an answer took, prompt by prompt, as the field that it is told in, if it was asked for."""
    return {"timings": [asdict(t) for t in ended]} if timed else {}


@dataclass
class Call:
    """A tool that the model has called."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass
class Choice:
    """What one choice has said so far, taken apart."""

    reading: Reading
    parser: OutputParser | None = None
    text: list[str] = field(default_factory=list)
    thought: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None
    stop: str | int | None = None
    thinking_tokens: int = 0
    offset: int = 0
    """Characters of all tokens whose log-probabilities were streamed."""

    def __post_init__(self) -> None:
        self.parser = self.reading.parser() if self.reading.needed else None

    def take(self, chunk: Chunk) -> list[Event]:
        """Collect a chunk; returns what it says, taken apart."""
        events: list[Event] = [Said(chunk.text)] if chunk.text else []
        if self.parser is not None:
            events = self.parser.feed(chunk.text)
            if chunk.finish_reason is not None:
                events = [*events, *self.parser.finish()]
        events = [event for event in events if self._wanted(event)]
        for event in events:
            match event:
                case Said(text):
                    self.text.append(text)
                case Thought(text):
                    self.thought.append(text)
                case CallBegins(name, given):
                    box = self.reading.toolbox
                    self.calls.append(Call(box.call_id(given) if box is not None else given, name))
                case CallArguments(text):
                    self.calls[-1].arguments.append(text)
        if self.thought and not (self.text or self.calls):
            self.thinking_tokens += len(chunk.token_ids)
        self.logprobs += chunk.logprobs
        self.reason, self.stop = chunk.finish_reason or self.reason, chunk.stop
        return events

    def _wanted(self, event: Event) -> bool:
        """Where calls are wanted one at a time, those after the first are left out."""
        box = self.reading.toolbox
        if box is None or box.parallel or not isinstance(event, CallBegins | CallArguments):
            return True
        self._begun = self._begun + isinstance(event, CallBegins)
        return self._begun == 1

    _begun: int = 0

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, as OpenAI says it."""
        return "tool_calls" if self.calls and self.reason == "stop" else self.reason


@dataclass
class Answer(ABC):
    """An answer on its way: what was said, and how a protocol writes it, whole or as events of a stream."""

    id: str
    model: str
    tokenizer: Tokenizer
    count: int
    reading: Reading = NOTHING
    created: int = field(default_factory=lambda: int(time.time()))
    choices: list[Choice] = field(init=False)
    prompt_field: ClassVar[str] = "messages"
    """The field of the request that the prompt is in."""
    operation: ClassVar[str] = "chat"
    """What traces call it."""

    def __post_init__(self) -> None:
        self.choices = [Choice(self.reading) for _ in range(self.count)]

    @property
    def aborted(self) -> bool:
        """Whether a choice was cut off by the request's deadline."""
        return any(choice.reason == "abort" for choice in self.choices)

    def add(self, chunk: Chunk) -> None:
        """Collect a chunk."""
        self.choices[chunk.choice].take(chunk)

    @staticmethod
    def reason(chunks: list[Chunk]) -> str:
        """Why the request ended whose last chunks these are."""
        return next((chunk.finish_reason for chunk in reversed(chunks) if chunk.finish_reason), "stop")

    def usage(self, ended: list[RequestTimings]) -> dict[str, Any]:
        """Tokens, as OpenAI counts them."""
        usage = usage_of(ended)
        usage["completion_tokens_details"]["reasoning_tokens"] = sum(c.thinking_tokens for c in self.choices)
        return usage

    @abstractmethod
    def report(self, ended: list[RequestTimings]) -> dict[str, Any]:
        """The whole answer."""

    @abstractmethod
    def opening(self) -> list[bytes]:
        """What a stream begins with."""

    @abstractmethod
    def frames(self, chunk: Chunk) -> list[bytes]:
        """A chunk as events of a stream."""

    @abstractmethod
    def closing(self, ended: list[RequestTimings], *, usage: bool, timed: bool) -> list[bytes]:
        """What a stream ends with; with `usage` and timings if they were asked for."""

    def failure(self, error: ApiError) -> bytes:
        """A problem in the middle of a stream."""
        return frame(error.object())

    def _token(self, token: int) -> tuple[str, list[int]]:
        data = self.tokenizer.token_bytes[token] if token < len(self.tokenizer.token_bytes) else b""
        return data.decode("utf-8", "replace"), list(data)


def frame(value: Any, name: str = "") -> bytes:
    """An event of a stream."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(value) + b"\n\n"


class _OpenAIAnswer(Answer):
    """What OpenAI's first two protocols share."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def closing(self, ended: list[RequestTimings], *, usage: bool, timed: bool) -> list[bytes]:
        """Usage in an event of its own, then the mark of the end."""
        frames = []
        if usage or timed:
            last = self._head(self.chunk_kind) | {"choices": []} | ({"usage": self.usage(ended)} if usage else {})
            frames.append(frame(last | timings_of(ended, timed=timed)))
        return [*frames, b"data: [DONE]\n\n"]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class ChatAnswer(_OpenAIAnswer):
    """chat.completion."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def report(self, ended: list[RequestTimings]) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            {
                "index": index,
                "message": self._message(choice),
                "logprobs": self._logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop,
            }
            for index, choice in enumerate(self.choices)
        ]
        return self._head(self.kind) | {"choices": choices, "usage": self.usage(ended)}

    def _message(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.thought:
            message["reasoning_content"] = message["reasoning"] = "".join(choice.thought)
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {
                    "id": call.id, "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for call in choice.calls
            ]  # fmt: skip
        return message

    def opening(self) -> list[bytes]:
        """One event per choice that says who speaks."""
        return [frame(self._delta(index, {"role": "assistant", "content": ""})) for index in range(self.count)]

    def frames(self, chunk: Chunk) -> list[bytes]:
        """A chunk as an event, if it says anything yet."""
        choice = self.choices[chunk.choice]
        events = choice.take(chunk)
        if not events and not chunk.finish_reason and not chunk.logprobs:
            return []
        reason = choice.finish_reason if chunk.finish_reason else None
        delta = delta_of(events, choice)
        return [frame(self._delta(chunk.choice, delta, self._logprobs(chunk.logprobs), reason))]

    def _delta(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._head(self.chunk_kind) | {"choices": [choice]}

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


def delta_of(events: Sequence[Event], choice: Choice) -> dict[str, Any]:
    """What was said last, as a chat's delta. The last of the choice's calls is the one that events speak of last."""
    delta: dict[str, Any] = {}
    begun = sum(isinstance(event, CallBegins) for event in events)
    index = len(choice.calls) - begun - 1
    for event in events:
        match event:
            case Said(text):
                delta["content"] = delta.get("content", "") + text
            case Thought(text):
                delta["reasoning_content"] = delta["reasoning"] = delta.get("reasoning", "") + text
            case CallBegins(name):
                index += 1
                call = {"index": index, "id": choice.calls[index].id, "type": "function"}
                delta.setdefault("tool_calls", []).append(call | {"function": {"name": name, "arguments": ""}})
            case CallArguments(text):
                calls = delta.setdefault("tool_calls", [])
                if not calls or calls[-1]["index"] != index:
                    calls.append({"index": index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += text
    return delta


class CompletionAnswer(_OpenAIAnswer):
    """text_completion."""

    kind = chunk_kind = "text_completion"
    prompt_field, operation = "prompt", "text_completion"
    echoed: Sequence[str] = ()
    """What each choice says before its text: the prompts, where they are to be said again."""
    scored: Sequence[dict[str, Any]] = ()
    """The log-probabilities of what is echoed."""

    def score(self, prompts: list[list[int]], scores: list[list[TokenLogprob]]) -> None:
        """Take log-probabilities of the prompts, of all tokens but each one's first, for which there is none."""
        scored = []
        for tokens, entries in zip(prompts, scores, strict=True):
            scored.append(self._logprobs([TokenLogprob(tokens[0], 0.0), *entries], 0))
            scored[-1]["token_logprobs"][0] = scored[-1]["top_logprobs"][0] = None
        self.scored = [one for one in scored for _ in range(self.count // len(prompts))]
        for choice, one in zip(self.choices, self.scored, strict=True):
            choice.offset = sum(map(len, one["tokens"]))

    def report(self, ended: list[RequestTimings]) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            self._choice(index, self._echo(index) + "".join(c.text), c.logprobs, c.reason, c.stop, c.offset)
            for index, c in enumerate(self.choices)
        ]
        for made, before in zip(choices, self.scored, strict=False):
            after = made["logprobs"] or {}
            made["logprobs"] = {name: [*values, *after.get(name, ())] for name, values in before.items()}
        return self._head(self.kind) | {"choices": choices, "usage": self.usage(ended)}

    def opening(self) -> list[bytes]:
        """Nothing comes before the text, unless the prompt is to be said again."""
        return [
            frame(self._head(self.kind) | {"choices": [self._choice(index, text, (), None, None) | scored]})
            for index, text in enumerate(self.echoed)
            if (scored := {"logprobs": self.scored[index]} if self.scored else {}) or text
        ]

    def _echo(self, index: int) -> str:
        return self.echoed[index] if self.echoed else ""

    def frames(self, chunk: Chunk) -> list[bytes]:
        """A chunk as an event, if it says anything yet."""
        taken = self.choices[chunk.choice]
        taken.take(chunk)
        if not chunk.text and not chunk.finish_reason and not chunk.logprobs:
            return []
        choice = self._choice(chunk.choice, chunk.text, chunk.logprobs, chunk.finish_reason, chunk.stop, taken.offset)
        taken.offset += sum(len(self._token(entry.token)[0]) for entry in chunk.logprobs)
        return [frame(self._head(self.kind) | {"choices": [choice]})]

    def _choice(
        self, index: int, text: str, entries: Any, reason: str | None, stop: str | int | None, offset: int = 0
    ) -> dict[str, Any]:
        logprobs = self._logprobs(entries, offset) if entries else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop}

    def _logprobs(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        texts = [self._token(entry.token)[0] for entry in entries]
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            # Tokens that are no characters look the same: the likeliest of them is told.
            "top_logprobs": [{self._token(t)[0]: value for t, value in reversed(entry.top)} for entry in entries],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)),
        }
