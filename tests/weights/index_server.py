"""A small package index over HTTP: pages as JSON or HTML, wheels with ranges or without; breaks off where told to."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

JSON = "application/vnd.pypi.simple.v1+json"


def wheel(files: dict[str, bytes]) -> bytes:
    """A wheel's bytes, as far as anybody looks; not compressed."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return raw.getvalue()


class Index:
    """`files` (by file name) of one project; the first `breaks` answers with one end after half of it."""

    def __init__(self, project: str, files: dict[str, bytes]):
        self.project, self.files = project, files
        self.sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        self.breaks, self.ranges, self.json = 0, True, True
        self.url, self.password, self.moved = "", "", ""
        self.asked: list[tuple[str, str]] = []
        """(path, Range header) of every request."""

    @contextmanager
    def serve(self) -> Iterator[None]:
        index = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                pass

            def do_GET(self) -> None:
                index.answer(self)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            self.url = f"http://127.0.0.1:{server.server_address[1]}"
            yield
        finally:
            server.shutdown()
            server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append((request.path, request.headers.get("Range", "")))
        if request.headers.get("Authorization", "") != self.password:
            return self._send(request, 401, b"", {})
        if request.path == f"/simple/{self.project}/":
            host = request.headers["Host"]
            if self.json and JSON in request.headers.get("Accept", ""):
                files = [  # absolute, as many indexes name their files
                    {"filename": name, "url": f"http://{host}/files/{name}", "hashes": _hashes(self.sums[name])}
                    for name in self.files
                ]
                return self._send(request, 200, json.dumps({"files": files}).encode(), {"Content-Type": JSON})
            lines = [f'<a href="../../files/{name}{_fragment(self.sums[name])}">{name}</a>' for name in self.files]
            return self._send(request, 200, "\n".join(lines).encode(), {"Content-Type": "text/html"})
        if request.path == "/moved":
            return self._send(request, 302, b"", {"Location": self.moved})
        name = request.path.removeprefix("/files/")
        if name not in self.files:
            return self._send(request, 404, b"", {})
        data = self.files[name]
        start = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0]) * self.ranges
        if start >= len(data):
            return self._send(request, 416, b"", {"Content-Range": f"bytes */{len(data)}"})
        place = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        half = bool(self.breaks)
        self.breaks -= half
        return self._send(request, 206 if start else 200, data[start:], place, half)

    def _send(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str], half: bool = False
    ) -> None:
        request.send_response(status)
        for key, value in headers.items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[: len(body) // 2] if half else body)
        request.close_connection = request.close_connection or half


def _hashes(sum_: str) -> dict[str, str]:
    return {"sha256": sum_} if sum_ else {}


def _fragment(sum_: str) -> str:
    return f"#sha256={sum_}" if sum_ else ""
