"""Connections have an end: heads that never come or never stop, readers who stand still, too many at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn

from slipstream.serving import bodies, http
from slipstream.serving.app import Api
from slipstream.serving.exchange import ServerLimits
from slipstream.serving.keys import Keys

Use = Callable[[Any], Awaitable[None]]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Says how long the body was; on /long, far more than anybody's buffers hold."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(2000 if scope["path"] == "/long" else 0):
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
    await send({"type": "http.response.body", "body": str(size).encode()})


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[tuple[int, uvicorn.Server]]:
    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off", http=http.BoundedProtocol)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1], server
    finally:
        server.should_exit = server.force_exit = True
        await task


def with_server(use: Callable[[int, uvicorn.Server], Awaitable[None]], app: Any = app) -> None:
    async def run() -> None:
        async with serving(app) as (port, server):
            await asyncio.wait_for(use(port, server), 30)

    asyncio.run(run())


async def said(port: int, *pieces: bytes, pause: float = 0.0) -> bytes:
    """What the server says to some bytes until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.create_task(reader.read())
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
            if answer.done():
                break
    result = await answer
    writer.close()
    return result


def error_of(answer: bytes, status: int) -> str:
    """The message of an answer that is OpenAI's error, and nothing else."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"content-type: application/json\r\n" in head
    assert b"content-length: %d\r\n" % len(body) in head
    error = json.loads(body)["error"]
    kind = "server_error" if status >= 500 else "invalid_request_error"
    assert error == {"message": error["message"], "type": kind, "param": None, "code": None}
    assert error["message"]
    return str(error["message"])


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


def test_whole_requests_pass() -> None:
    async def use(port: int, server: uvicorn.Server) -> None:
        body = b"z" * 1_000_000
        whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        assert b"1000000" in await said(port, whole)
        pieces = [whole[at : at + 100_000] for at in range(0, len(whole), 100_000)]
        assert b"1000000" in await said(port, *pieces)
        chunks = b"".join(b"1\r\nz\r\n" for _ in range(50_000)) + b"0\r\n\r\n"
        assert b"50000" in await said(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
        assert b" 200 " in await said(port, HEAD + b"X: " + b"y" * 60_000 + b"\r\n\r\n")

    with_server(use)


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("one endless field", [HEAD + b"X: ", *[b"y" * 50_000] * 40]),
        ("a long field in one piece", [HEAD + b"X: " + b"y" * 70_000 + b"\r\n\r\n"]),
        ("many fields", [HEAD, *[b"X: y\r\n" * 1000] * 40]),
        ("an endless address", [b"GET /", *[b"y" * 50_000] * 40]),
        ("an endless method", [b"G" * 50_000] * 40),
        ("an endless field after the body", [
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nz\r\n0\r\nX: ", *[b"y" * 50_000] * 40]),
        ("an endless extension of a chunk", [
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", *[b"y" * 50_000] * 40]),
    ],
)  # fmt: skip
def test_what_does_not_stop_is_refused(name: str, pieces: list[bytes]) -> None:
    async def use(port: int, server: uvicorn.Server) -> None:
        answer = await said(port, *pieces, pause=0.002)
        assert answer == b"" or answer.split(b" ")[1] in (b"431", b"400"), answer[:200]
        assert not server.server_state.connections

    with_server(use)


@pytest.mark.parametrize("begin", [b"", b"GET / HT", HEAD, b"\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_head_that_does_not_come_is_not_waited_for(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it drips: what counts is when it is whole."""
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.4)

    async def use(port: int, server: uvicorn.Server) -> None:
        drip = [b"X", b"y", b"z"] * 100 if begin == HEAD else [b"GET / HT"] if begin.endswith(b"\r\n\r\n") else []
        answer = await said(port, begin, *drip, pause=0.02)
        if begin.endswith(b"\r\n\r\n"):  # what came before it was answered
            answer = answer[answer.rindex(b"HTTP/1.1 ") :]
        assert "did not arrive" in error_of(answer, 408)
        assert not server.server_state.connections

    with_server(use)


@pytest.mark.parametrize("pieces", [[HEAD + b"X: " + b"y" * 70_000], [b"GET /", *[b"y" * 50_000] * 2]])
def test_what_is_too_long_is_told_so(pieces: list[bytes]) -> None:
    async def use(port: int, server: uvicorn.Server) -> None:
        assert str(http.HEAD_BYTES) in error_of(await said(port, *pieces, pause=0.002), 431)

    with_server(use)


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00", b"hello\r\n\r\n", b"GET / HTTP/9\r\n\r\n"])
def test_what_is_no_request_is_told_so(garbage: bytes) -> None:
    async def use(port: int, server: uvicorn.Server) -> None:
        assert "HTTP" in error_of(await said(port, garbage), 400)

    with_server(use)


def api() -> Api:
    """The routes without an engine: those that need none have all they want."""
    nothing = cast(Any, SimpleNamespace(info=None))
    return Api(nothing, nothing, None, "tiny", Keys([]), ServerLimits())


BODY = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n"
BODIES = [
    b"Content-Length: 99\r\n\r\n",
    b'Content-Length: 99\r\n\r\n{"a',
    b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
]
"""Bodies that have begun: with nothing in them, with something, with no end in sight."""


@pytest.mark.parametrize("begin", BODIES)
@pytest.mark.parametrize("drips", [False, True])
def test_a_body_that_does_not_come_is_not_waited_for(
    begin: bytes, drips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts is when it is whole."""
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.3)
    drop = b"1\r\nx\r\n" if b"chunked" in begin else b"x"

    async def use(port: int, server: uvicorn.Server) -> None:
        pieces = [BODY + b"Connection: close\r\n" + begin, *[drop] * (60 if drips else 0)]
        assert error_of(await said(port, *pieces, pause=0.02), 408) == "the body did not arrive within 0.3 s"
        assert not server.server_state.connections

    with_server(use, api().app())


def test_what_is_left_of_a_body_holds_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes on after being refused has as long as for a head."""
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.1)
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.3)

    async def use(port: int, server: uvicorn.Server) -> None:
        answer = await said(port, BODY + b"Content-Length: 9999\r\n\r\n", *[b"x"] * 500, pause=0.02)
        assert b"the body did not arrive" in answer
        assert not server.server_state.connections

    with_server(use, api().app())


@pytest.mark.parametrize("sent", [b"", b"GET / HT", BODY, *(BODY + body for body in BODIES)])
def test_who_closes_one_half_has_left(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing more can come from there: it is not waited for, and nobody has failed."""
    routes = api()

    async def use(port: int, server: uvicorn.Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        await asyncio.sleep(0.05)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 5) == b""
        while server.server_state.connections or server.server_state.tasks:
            await asyncio.sleep(0.01)
        writer.close()

    with_server(use, routes.app())
    assert not caplog.records
    counted = {labels["status"] for _, labels, *_ in routes.metrics.failed.collect()[0].samples}
    assert counted == ({"499"} if b"\r\n\r\n" in sent else set())


def test_who_does_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "WRITE_SECONDS", 0.4)

    async def use(port: int, server: uvicorn.Server) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
        while not server.server_state.connections:
            await asyncio.sleep(0.01)
        while server.server_state.connections:
            await asyncio.sleep(0.05)
        writer.close()
        assert b" 200 " in await said(port, HEAD.replace(b"POST", b"GET") + b"\r\n")

    with_server(use)


def test_more_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "most_connections", lambda: 3)

    async def use(port: int, server: uvicorn.Server) -> None:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        while len(server.server_state.connections) < 3:
            await asyncio.sleep(0.01)
        assert "too many connections" in error_of(await said(port, HEAD + b"\r\n"), 503)
        for _, writer in held:
            writer.close()
        while server.server_state.connections:
            await asyncio.sleep(0.01)
        assert b" 200 " in await said(port, HEAD + b"\r\n")

    with_server(use)


def test_files_are_left_for_everything_else() -> None:
    assert 16 <= http.most_connections() <= http.MOST_CONNECTIONS
