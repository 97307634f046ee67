"""A small Hugging Face Hub: one repository over HTTP, as far as huggingface_hub asks; breaks off where told to."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


class Hub:
    """`files` of `repository`; the first `breaks` answers with a large file end after half of it."""

    def __init__(self, repository: str, files: dict[str, bytes], breaks: int = 0):
        self.repository, self.files, self.breaks = repository, files, breaks
        self.asked: list[tuple[str, str, str]] = []
        """(method, path, Range header) of every request."""

    @contextmanager
    def serve(self) -> Iterator[str]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        self.asked.append((request.command, path, request.headers.get("Range", "")))
        api = f"/api/models/{self.repository}"
        if path in (api, f"{api}/revision/main"):
            siblings = [{"rfilename": name} for name in self.files]
            return self._json(request, {"id": self.repository, "sha": COMMIT, "siblings": siblings})
        if path.startswith(f"{api}/tree/"):
            return self._json(request, [self._entry(name, data) for name, data in self.files.items()])
        for name, data in self.files.items():
            if path in (f"/{self.repository}/resolve/{revision}/{name}" for revision in ("main", COMMIT)):
                return self._file(request, data, body)
        request.send_response(404)
        request.send_header("X-Error-Code", "RepoNotFound")
        request.send_header("Content-Length", "0")
        request.end_headers()
        return None

    def _entry(self, name: str, data: bytes) -> dict[str, object]:
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": git_sum(data)}
        if is_large(data):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry

    def _json(self, request: BaseHTTPRequestHandler, value: object) -> None:
        raw = json.dumps(value).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(raw)))
        request.end_headers()
        request.wfile.write(raw)

    def _file(self, request: BaseHTTPRequestHandler, data: bytes, body: bool) -> None:
        start = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        part = data[start:]
        request.send_response(206 if start else 200)
        request.send_header("ETag", f'"{hashlib.sha256(data).hexdigest() if is_large(data) else git_sum(data)}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("Accept-Ranges", "bytes")
        request.send_header("Content-Length", str(len(part)))
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        request.end_headers()
        if not body:
            return
        if self.breaks and is_large(data):
            self.breaks -= 1
            request.wfile.write(part[: len(part) // 2])
            request.wfile.flush()
            request.close_connection = True
            request.connection.close()
            return
        request.wfile.write(part)


def is_large(data: bytes) -> bool:
    """Whether the Hub would keep it in its large file storage."""
    return len(data) > 100_000


def git_sum(data: bytes) -> str:
    """What git calls a file of this content."""
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
