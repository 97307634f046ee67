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
    cut: bool = False
    """Whether the answer ended because it was long enough."""
    problem: str = ""
    """Why nothing can be learned from it, if so."""


def read_log(path: Path) -> Iterator[Exchange | Record]:
    """Line by line, gzip or not. Raises LogError with the line's number."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            number = 0
            while line := file.readline(MOST_LINE + 1):
                number += 1
                if len(line) > MOST_LINE:
                    raise LogError(f"{path}, line {number}: has more than {MOST_LINE >> 20} MB")
                if line.strip():
                    yield from _line(line, f"{path}, line {number}")
    except (OSError, EOFError, zlib.error) as error:
        raise LogError(f"{path}: {error}") from error


def _line(line: bytes, where: str) -> Iterator[Exchange | Record]:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise LogError("is not a JSON object")
        if "tokens" in row and "spans" in row:
            yield record_of(row)
        else:
            yield from _exchanges(row, hashlib.sha256(line.strip()).hexdigest()[:24])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, LogError, RecordError) as error:
        what = (
            str(error)
            if isinstance(error, LogError | RecordError)
            else f"no exchange that is known how to read ({error})"
        )
        raise LogError(f"{where}: {what}") from error


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
        "max_tokens": _length(asked), "problem": _problem(asked),
    }  # fmt: skip
    answer, found["cut"] = _answer(row.get("response"))
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


def _answer(response: Any) -> tuple[str | None, bool]:
    """(the answer, whether it was cut off)."""
    if response is None or isinstance(response, str):
        return response, False
    body = response.get("body") or response
    if "error" in body or not body.get("choices"):  # a request that failed: it can still be answered anew
        return None, False
    choice = body["choices"][0]
    text = choice["message"].get("content") if "message" in choice else choice.get("text")
    return str(text) if text else None, choice.get("finish_reason") == "length"
