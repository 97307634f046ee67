"""Connections: how long a request's head may be and take, how long a reader may stand still, how many there may be.

uvicorn's own limits count from the first answer on; whoever never sends a whole head, or never reads, costs it memory
or a socket for ever, and needs no key for that.
"""

from __future__ import annotations

import asyncio
import resource

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from slipstream.serving.errors import ApiError

HEAD_BYTES = 64 << 10
"""Of a request's line and fields, and of whatever else comes without a byte of a body."""
HEAD_SECONDS = 15.0
"""From the connection, or the first byte of a later request, to the end of the head."""
WRITE_SECONDS = 60.0
"""For which a reader may take nothing while there is something for it."""
MOST_CONNECTIONS = 4096
SPARE_FILES = 64
"""File descriptors that are left for everything else."""


def most_connections() -> int:
    """As many as there may be in this process."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if files == resource.RLIM_INFINITY else max(16, min(MOST_CONNECTIONS, files - SPARE_FILES))


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with an end to everything that a client can leave unfinished."""

    _unseen = 0
    """Bytes since the parser last got anywhere: httptools keeps what it has of a field until that is whole."""
    _head = 0
    _too_long = False
    _waiting: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody has come."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            self._refuse(503, "too many connections")
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Somebody is gone."""
        self._head_came()
        self._read_on()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """More of a request, or of several."""
        if self.transport.is_closing():
            return
        self._unseen += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unseen > HEAD_BYTES:
            self._refuse(431, f"a request's head has at most {HEAD_BYTES} bytes")
        elif self._waiting is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_head()

    def on_message_begin(self) -> None:
        """A head begins."""
        self._head = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field, of the head or after a body."""
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._unseen = 0
        self._head_came()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._unseen = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._unseen = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client does not read what is there for it."""
        super().pause_writing()
        self._writing = self._writing or self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It does again."""
        self._read_on()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What is no request is refused, and what is too long is told so."""
        if self._too_long:
            self._refuse(431, f"a request's head has at most {HEAD_BYTES} bytes")
        else:
            self._refuse(400, "this is no HTTP request")

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > HEAD_BYTES:
            self._too_long = True
            raise ValueError("the head is too long")  # ends the parser, which calls send_400_response

    def _wait_for_head(self) -> None:
        self._waiting = self.loop.call_later(HEAD_SECONDS, self._refuse, 408, "the request's head did not arrive")

    def _head_came(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _read_on(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _refuse(self, status: int, why: str) -> None:
        self._head_came()
        if self.transport.is_closing():
            return
        body = ApiError(status, why, "server_error" if status >= 500 else "invalid_request_error").body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
