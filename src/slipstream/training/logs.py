"""Logs: lines of OpenAI-format JSON as prompts, settings and answers; nothing of a model in them yet.

Known shapes, one to a line: {"messages": […]}, {"prompt": …, "completion": …}, a request and its response
({"request" or "body": …, "response": …}, as batches and gateways log them), prompt sets ({"question": …},
{"turns": […]}), and records as `traffic export` writes them ({"tokens": […], "spans": […]}).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.training.records import SETTINGS, Record, RecordError

MOST_LINE = 16 << 20
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class LogError(SlipstreamError):
    """A line that is none of the known shapes."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What was asked and, if the log has it, answered. Either `messages` or a `prompt`."""

    request: str
    messages: tuple[Mapping[str, Any], ...] = ()
    prompt: str = ""
    answer: str | None = None
    tag: str = ""
    time: float = 0.0
    max_tokens: int | None = None
    settings: Mapping[str, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    """What ends its answer; to answer with, never to be kept."""
    cut: bool = False
    """Whether the answer ended because it was long enough."""
    problem: str = ""
    """Why nothing can be learned from it, if so."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A line that is none of the known shapes, or from which on the file is damaged."""

    line: int
    problem: str


def read_log(path: Path, *, texts: bool = False) -> Iterator[Exchange | Record | Unread]:
    """Line by line, gzip or not; `texts`: of what has both, the text is taken and not the tokens.

    Raises LogError for a file of which nothing can be read.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rb") as file:
            while line := file.readline(MOST_LINE + 1):
                number += 1
                if len(line) > MOST_LINE:
                    yield Unread(number, f"has more than {MOST_LINE >> 20} MB")
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MOST_LINE)
                elif line.strip():
                    yield from _line(line, number, texts=texts)
    except (OSError, EOFError, zlib.error) as error:
        if not number:
            raise LogError(f"{path}: {error}") from error
        yield Unread(number + 1, f"cannot be read, nor what follows: {error}")


def _line(line: bytes, number: int, *, texts: bool = False) -> Iterator[Exchange | Record | Unread]:
    """All that a line has, or that it cannot be read: one that ends in an error brings nothing."""
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise LogError("is not a JSON object")
        found: list[Exchange | Record]
        if "tokens" in row and "spans" in row:
            found = [_said_again(row) if texts and ("messages" in row or "prompt" in row) else record_of(row)]
        else:
            found = list(_exchanges(row, hashlib.sha256(line.strip()).hexdigest()[:24]))
    except (LogError, RecordError) as error:
        yield Unread(number, str(error))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        yield Unread(number, f"no exchange that is known how to read ({error})")
    else:
        yield from found


def record_of(row: Mapping[str, Any]) -> Record:
    """A record as `row_of` makes it. Raises RecordError, ValueError, TypeError or KeyError."""
    tokens, spans, steps = row["tokens"], row["spans"], row.get("steps") or ()
    if not all(type(token) is int and 0 <= token < 1 << 32 for token in (*tokens, *steps)):
        raise RecordError("a record's tokens are whole numbers")
    settings = {str(name)[:40]: float(value) for name, value in (row.get("settings") or {}).items()}
    words = {name: str(row.get(name) or "") for name in ("target", "template", "tag", "key", "request")}
    return Record(
        tuple(tokens), tuple((int(a), int(b)) for a, b in spans), time=float(row.get("time") or 0.0),
        settings=settings, steps=tuple(steps), **words,
    )  # fmt: skip


def _said_again(row: Mapping[str, Any]) -> Exchange:
    """The text of an exported record, for another target than the one whose tokens it has."""
    record = record_of(row)
    messages = tuple(_message(message) for message in row.get("messages") or ())
    turns = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    return Exchange(
        record.request, turns, "" if turns else str(row["prompt"]), None, record.tag, record.time,
        settings=record.settings,
    )  # fmt: skip


def row_of(record: Record) -> dict[str, Any]:
    """A record as a JSON object."""
    return {
        "tokens": list(record.tokens), "spans": [list(span) for span in record.spans], "steps": list(record.steps),
        "settings": dict(record.settings), "time": record.time, "target": record.target, "template": record.template,
        "tag": record.tag, "key": record.key, "request": record.request,
    }  # fmt: skip


def _exchanges(row: Mapping[str, Any], request: str) -> Iterator[Exchange]:
    asked = row.get("request") or row.get("body") or row
    if not isinstance(asked, Mapping):
        raise LogError("its request is not an object")
    found: dict[str, Any] = {
        "request": str(row.get("custom_id") or row.get("id") or request)[:200],
        "tag": str((asked.get("metadata") or {}).get("tag") or row.get("tag") or row.get("category") or "")[:64],
        "time": _seconds(row.get("created") or row.get("time")),
        "settings": _settings(asked),
        "max_tokens": _length(asked), "stop": _stops(asked.get("stop")), "problem": _problem(asked),
    }  # fmt: skip
    answers = _answers(row.get("response"))
    for choice, (answer, cut) in enumerate(answers):  # each is an answer of its own to the same request
        name = found["request"] if len(answers) == 1 else f"{found['request']}/{choice}"
        yield from _conversations(row, asked, answer, found | {"request": name, "cut": cut})


def _conversations(
    row: Mapping[str, Any], asked: Mapping[str, Any], answer: str | None, found: dict[str, Any]
) -> Iterator[Exchange]:
    if "turns" in asked or "question" in asked:
        content = str(asked["turns"][0] if "turns" in asked else asked["question"])
        yield Exchange(messages=({"role": "user", "content": content},), answer=answer, **found)
    elif "messages" in asked:
        messages = [_message(message) for message in asked["messages"]]
        if answer is not None:
            yield Exchange(messages=tuple(messages), answer=answer, **found)
            return
        turns = [place for place, message in enumerate(messages) if place and message["role"] == "assistant"]
        if not turns:
            yield Exchange(messages=tuple(messages), **found)
        for place in turns:  # every answer of the conversation, after what came before it
            name = found["request"] if len(turns) == 1 else f"{found['request']}#{place}"
            content = messages[place]["content"]
            yield Exchange(messages=tuple(messages[:place]), answer=content, **(found | {"request": name}))
    else:
        said = asked.get("completion", row.get("completion"))
        yield Exchange(prompt=str(asked["prompt"]), answer=answer if said is None else str(said), **found)


def _settings(asked: Mapping[str, Any]) -> dict[str, float]:
    """As records have them."""
    found = {name: float(asked[name]) for name in SETTINGS if isinstance(asked.get(name), int | float)}
    if bias := asked.get("logit_bias"):
        found["logit_bias"] = float(len(bias))
    form = asked.get("response_format")
    formed = isinstance(form, Mapping) and form.get("type") not in (None, "text")
    if formed or asked.get("structured_outputs") or any(name.startswith("guided_") and asked[name] for name in asked):
        found["grammar"] = 1.0
    return found


def _seconds(when: Any) -> float:
    """Since the epoch, of a number or an ISO date; 0 for anything else."""
    try:
        if isinstance(when, str):
            return datetime.fromisoformat(when).timestamp()
        return float(when or 0.0)
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _length(asked: Mapping[str, Any]) -> int | None:
    value = asked.get("max_completion_tokens") or asked.get("max_tokens")
    return value if type(value) is int and value > 0 else None


def _stops(value: Any) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(stop, str) for stop in stops):
        raise LogError("what stops an answer is no string, nor a list of some")
    return stops


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise LogError(f"a message has the role {str(role)[:40]!r}")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if part.get("type") == "text")
    return {"role": role, "content": content or ""}


def _problem(asked: Mapping[str, Any]) -> str:
    """What of a request is not in the prompt that would be made of it."""
    if asked.get("tools"):
        return "a conversation with tools is not imported: its prompt would not be the one that was served"
    for message in asked.get("messages") or ():
        content = message.get("content")
        parts = content if isinstance(content, list) else ()
        if message.get("tool_calls") or any(part.get("type") != "text" for part in parts):
            return "a conversation with calls, images or sound is not imported: only text is learned from"
    return ""


def _answers(response: Any) -> list[tuple[str | None, bool]]:
    """(an answer, whether it was cut off), at least one."""
    if response is None or isinstance(response, str):
        return [(response, False)]
    body = response.get("body") or response
    if "error" in body or not body.get("choices"):  # a request that failed: it can still be answered anew
        return [(None, False)]
    return [_answer(choice) for choice in body["choices"]]


def _answer(choice: Mapping[str, Any]) -> tuple[str | None, bool]:
    text = choice["message"].get("content") if "message" in choice else choice.get("text")
    return str(text) if text else None, choice.get("finish_reason") == "length"
