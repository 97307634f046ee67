"""Connections: heads and bodies that are too much, keys that are none, a server that is gone (classes 9 and 10)."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from slipstream.cli.serve import _listen
from slipstream.serving.errors import ApiError
from slipstream.serving.keys import hashed, load_keys
from tests.attacks.helpers import SOURCE, engines_of
from tests.serving.conftest import COMMAND, KEY, Server


class Test9Connections:
    @pytest.mark.parametrize(
        "head",
        [
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Big: " + b"a" * (1 << 20) + b"\r\n\r\n",
            b"POST /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 100_000 + b"\r\n",
            b"\x00" * 4096, b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
        ],
    )  # fmt: skip
    def test_a_bad_head_costs_nothing(self, tenants: Server, head: bytes) -> None:
        host, port = tenants.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            try:
                connection.sendall(head)
                said = connection.recv(4096)
            except OSError:
                said = b""
        assert not said or said.startswith(b"HTTP/1.1 4")
        with tenants.client() as http:
            assert http.get("/health").status_code == 200

    def test_slow_heads_hold_up_nobody(self, tenants: Server) -> None:
        """A hundred heads that drip while others are served."""
        host, port = tenants.url.removeprefix("http://").split(":")
        dripping = [socket.create_connection((host, int(port)), timeout=10) for _ in range(100)]
        try:
            for letter in b"POST /v1/completions HTTP/1.1":
                for connection in dripping:
                    connection.sendall(bytes([letter]))
                if letter in b" ":
                    with tenants.client() as http:
                        answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=5)
                        assert answer.status_code == 200
        finally:
            for connection in dripping:
                connection.close()

    def test_a_storm_of_disconnects_leaves_nothing(self, tenants: Server) -> None:
        """Clients that ask for long answers and are gone, at whatever stage: nothing runs for them, nothing is held."""
        host, port = tenants.url.removeprefix("http://").split(":")
        body = b'{"prompt": "x", "max_tokens": 300, "stream": true, "ignore_eos": true, "n": 2}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode()
        request = head + f"\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        engine = tenants.engine_pid()
        for index in range(150):
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(request[: len(request) * (1 + index % 5) // 5])
                if index % 10 == 4:
                    connection.recv(200)
        end = time.monotonic() + 20
        with tenants.client() as http:
            while time.monotonic() < end:
                text = http.get("/metrics").text
                if all(f'vllm:num_requests_{what}{{model_name="tiny"}} 0.0' in text for what in ("running", "waiting")):
                    break
                time.sleep(0.1)
            else:
                raise AssertionError(text)
            assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        assert tenants.engine_pid() == engine

    def test_many_small_parts_do_not_grow(self, tenants: Server) -> None:
        """A body of parts of text, as many as fit: read in time that grows with its size, no faster."""
        parts = [{"type": "text", "text": "a"} for _ in range(20_000)]
        begun = time.monotonic()
        with tenants.client() as http:
            answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
        assert answer.status_code == 400
        assert time.monotonic() - begun < 10.0

    def test_a_server_that_is_killed_at_its_start_leaves_nothing(self, tiny_gguf: Path, tmp_path: Path) -> None:
        """Its engine's process has hardly begun then."""
        model = tmp_path / "model.gguf"
        model.symlink_to(tiny_gguf)
        server = subprocess.Popen([*COMMAND, str(model), "--port", "0"], stderr=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while not engines_of(model) and time.monotonic() < end:
            time.sleep(0.01)
        assert engines_of(model), "it was started"
        server.send_signal(signal.SIGKILL)
        server.wait(20)
        end = time.monotonic() + 20
        while engines_of(model) and time.monotonic() < end:
            time.sleep(0.05)
        left = engines_of(model)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left

    def test_no_answer_waits_for_an_acknowledgement(self) -> None:
        """Who acknowledges late would otherwise be answered late: 40 ms on a connection that is used again."""

        async def nodelay() -> int:
            connected: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
            listener = _listen("127.0.0.1", 0)
            server = await asyncio.start_server(lambda _, writer: connected.put_nowait(writer), sock=listener)
            _, theirs = await asyncio.open_connection(*listener.getsockname())
            ours = await connected.get()
            try:
                return int(ours.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            finally:
                theirs.close()
                ours.close()
                server.close()

        assert asyncio.run(nodelay())


class Test10Keys:
    ROUTES = (
        "/v1/models", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/metrics", "/explain",
        "/tokenize", "/admin/drafter", "/admin/activity", "/version", "/docs", "/openapi.json", "/nowhere",
        "//v1/models", "/v1/models/", "/health/../metrics", "/%2e%2e/metrics", "/debug", "/v1/responses/resp_1",
    )  # fmt: skip

    @pytest.mark.parametrize("path", ROUTES)
    @pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
    def test_nothing_is_open(self, tenants: Server, path: str, method: str) -> None:
        assert httpx.request(method, tenants.url + path).status_code == 401

    @pytest.mark.parametrize("header", ["", "Bearer", "Basic abc", f"bearer{KEY}", f"Bearer {KEY}x", KEY])
    def test_what_is_nearly_a_key_is_none(self, tenants: Server, header: str) -> None:
        assert httpx.get(f"{tenants.url}/v1/models", headers={"Authorization": header}).status_code == 401

    def test_keys_are_compared_by_digest(self) -> None:
        """In constant time, all of them: there is no early way out to time."""
        source = (SOURCE / "slipstream" / "serving" / "keys.py").read_text()
        assert "hmac.compare_digest" in source
        assert "== digest" not in source

    @pytest.mark.parametrize(
        ("shown", "fits"),
        [
            ("Bearer first key", "key-1"), ("Bearer second key", "key-2"), ("Bearer third key", "key-3"),
            ("Bearer no key of ours", None), ("Basic first key", None), ("", None),
        ],
    )  # fmt: skip
    def test_every_key_is_compared_whichever_fits(
        self, shown: str, fits: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whole digests, in the same order, by what takes as long for all: the first as well as the last, and none."""
        known, compare = ["first key", "second key", "third key"], hmac.compare_digest
        keys, compared, found = load_keys(known, None), list[tuple[bytes, bytes]](), None

        def counted(one: bytes, other: bytes) -> bool:
            compared.append((one, other))
            return compare(one, other)

        monkeypatch.setattr(hmac, "compare_digest", counted)
        with contextlib.suppress(ApiError):
            found = keys.find(shown).name
        assert found == fits
        assert compared == [(hashed(key), hashed(shown.partition(" ")[2])) for key in known]
