"""Connections have an end: heads that never come or never stop, readers who stand still, too many at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from slipstream.serving import http

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
async def serving() -> AsyncIterator[tuple[int, uvicorn.Server]]:
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


def with_server(use: Callable[[int, uvicorn.Server], Awaitable[None]]) -> None:
    async def run() -> None:
        async with serving() as (port, server):
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
        assert answer.count(b" 408 ") == 1
        assert not server.server_state.connections

    with_server(use)


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
        assert b" 503 " in await said(port, HEAD + b"\r\n")
        for _, writer in held:
            writer.close()
        while server.server_state.connections:
            await asyncio.sleep(0.01)
        assert b" 200 " in await said(port, HEAD + b"\r\n")

    with_server(use)


def test_files_are_left_for_everything_else() -> None:
    assert 16 <= http.most_connections() <= http.MOST_CONNECTIONS
