"""Batch: a file of requests in OpenAI's batch form is answered into another one; a run that was stopped goes on.

The requests go through the server's own routes, so that they mean what they mean there.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from starlette.types import ASGIApp, Message

from slipstream.errors import SlipstreamError, UsageError

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MOST_LINE = 16 << 20
TOO_MANY, SERVERS_FAULT, UNAVAILABLE = 429, 500, 503
"""Statuses of what may go better another time: the first, and all from the second on."""
REPEATED = "duplicate_custom_id"
"""The problem of a line whose custom_id is an earlier one's: by its name nobody could tell their answers apart."""
TRIES, AGAIN = 30, 2.0
"""How often a request is made while the engine is being started again, and the seconds in between."""


@dataclass
class Done:
    """What came of a batch."""

    answered: int = 0
    failed: int = 0
    known: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """A line: what to ask, or what is wrong with it."""

    custom_id: str
    url: str = ""
    body: bytes = b""
    problem: str = ""
    code: str = "invalid_request"
    """What kind of problem it is."""


def read_batch(path: Path) -> Iterator[Item]:
    """Line by line. Raises UsageError for lines that have no custom_id, and SlipstreamError where it cannot be read."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_LINE + 1), b""), 1):
                if line.strip():
                    yield _item(line, f"{path}, line {number}")
    except OSError as error:
        raise SlipstreamError(f"{path}: {error.strerror or error}") from error


def _item(line: bytes, where: str) -> Item:
    if len(line) > MOST_LINE:
        raise UsageError(f"{where}: has more than {MOST_LINE >> 20} MB")
    try:
        row = json.loads(line)
        name = row["custom_id"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{where}: is no JSON object with a custom_id") from error
    if not isinstance(name, str) or not name:
        raise UsageError(f"{where}: custom_id is a text")
    url, body = row.get("url"), row.get("body")
    if row.get("method", "POST") != "POST" or url not in ROUTES:
        return Item(name, problem=f"only POST to {', '.join(ROUTES)} is answered")
    if not isinstance(body, dict) or body.get("stream"):
        return Item(name, problem="body is an object, and does not ask for a stream")
    return Item(name, url, json.dumps(body).encode())


def answered(path: Path) -> set[str]:
    """The requests that a file has answers to.

    A last line that was cut off is cut off for good, and what failed for a reason that may be gone is left out; so are
    repeated names, which follow from the requests.
    """
    if not path.exists():
        return set()
    names: set[str] = set()
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with path.open("rb") as file, scratch.open("wb") as kept:
        for line in file:
            try:
                row = json.loads(line)
                name, status = str(row["custom_id"]), int((row.get("response") or {}).get("status_code", 200))
                code = (row.get("error") or {}).get("code")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if line.endswith(b"\n"):
                    scratch.unlink()
                    raise UsageError(f"{path} is there and is no batch's output") from error
                break
            if status == TOO_MANY or status >= SERVERS_FAULT or code == REPEATED:
                continue
            names.add(name)
            kept.write(line)
    os.replace(scratch, path)
    return names


async def run_batch(
    app: ASGIApp, items: Iterator[Item], out: Path, at_once: int, progress: Callable[[Done], None]
) -> Done:
    """Answer what is not answered yet, `at_once` at a time, each answer written as it comes."""
    known, seen, done = answered(out), set[str](), Done()
    with out.open("a", encoding="utf-8") as file:
        running: set[asyncio.Task[None]] = set()
        for item in items:
            repeated = item.custom_id in seen
            seen.add(item.custom_id)
            if repeated:
                item = Item(item.custom_id, problem="an earlier line has this custom_id", code=REPEATED)
            elif item.custom_id in known:
                done.known += 1
                continue
            while len(running) >= at_once:
                await _some(running)
            running.add(asyncio.create_task(_answer(app, item, file, done, progress)))
        while running:
            await _some(running)
    return done


async def _some(running: set[asyncio.Task[None]]) -> None:
    """Wait until at least one has ended. Raises what it raised."""
    ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    running -= ended
    for task in ended:
        task.result()


async def _answer(app: ASGIApp, item: Item, file: TextIO, done: Done, progress: Callable[[Done], None]) -> None:
    name = f"batch_req_{uuid.uuid4().hex[:24]}"
    row: dict[str, Any] = {"id": name, "custom_id": item.custom_id, "response": None, "error": None}
    if item.problem:
        row["error"] = {"code": item.code, "message": item.problem}
    else:
        status, body = await call(app, item.url, item.body)
        for _ in range(TRIES - 1):
            if status != UNAVAILABLE:
                break
            await asyncio.sleep(AGAIN)  # the engine is being started again
            status, body = await call(app, item.url, item.body)
        row["response"] = {"status_code": status, "request_id": name, "body": json.loads(body or b"null")}
    well = not item.problem and status == 200
    done.answered, done.failed = done.answered + well, done.failed + (not well)
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()
    progress(done)


async def call(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """POST to a route of an application in this process."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0),
    }  # fmt: skip
    sent: list[bytes] = []
    status, asked, ended = 500, False, asyncio.Event()

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            sent.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    finally:
        ended.set()
    return status, b"".join(sent)
