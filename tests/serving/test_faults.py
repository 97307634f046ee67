"""Faults: what clients do wrong, what breaks, and that nothing hangs or leaks."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from slipstream.paths import cache_folder
from tests.conftest import write_tiny_gguf
from tests.serving.conftest import COMMAND, KEY, LIMITED, Server, checked, start, stop

CHAT = "/v1/chat/completions"


def body(tokens: int = 20, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "ignore_eos": True, **more}


def head_of(payload: bytes) -> bytes:
    lines = [f"POST {CHAT} HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", f"Content-Length: {len(payload)}"]
    return "\r\n".join([*lines, "", ""]).encode()


def idle(server: Server, seconds: float = 10) -> None:
    """Wait until nothing runs and all blocks are to be had."""
    end = time.monotonic() + seconds
    with server.client() as http:
        while time.monotonic() < end:
            text = http.get("/metrics").text
            values = {line.split("{")[0]: line.rsplit(" ", 1)[1] for line in text.splitlines() if "{" in line}
            if {
                values[f"vllm:{name}"]
                for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            } == {"0.0"}:
                return
            time.sleep(0.2)
    raise AssertionError(text)


def asking(**fields: str) -> bytes:
    """A chat with some fields written out as raw JSON."""
    plain = {"messages": '[{"role": "user", "content": "x"}]', **fields}
    return ("{" + ", ".join(f'"{name}": {value}' for name, value in plain.items()) + "}").encode("latin-1")


def ticks(pid: int) -> int:
    """Hundredths of a second that a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


NO_REQUESTS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"[" * 100_000,
    asking(messages="3"),
    asking(messages="[1]"),
    asking(messages='[{"role": "user", "content": "\xff\xfe"}]'),
    asking(messages='[{"role": "user", "content": "\\ud800"}]'),
    asking(temperature="NaN"),
    asking(temperature="1e999"),
    asking(max_tokens="1e30"),
    asking(seed='"y"'),
]


@pytest.mark.parametrize("raw", NO_REQUESTS)
def test_bodies_that_are_no_requests(server: Server, raw: bytes) -> None:
    with server.client() as http:
        answer = http.post(CHAT, content=raw)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]


def test_large_bodies(server: Server) -> None:
    with server.client() as http:
        assert http.post(CHAT, content=b"x" * (9 << 20)).status_code == 413
        text = "a " * (3 << 20)
        assert http.post(CHAT, json=body() | {"messages": [{"role": "user", "content": text}]}).status_code == 400
        assert http.post(CHAT, json=body(stop=["s" * 10] * 100_000)).status_code == 400
        assert http.post(CHAT, json=body(2)).status_code == 200


def test_every_route_but_health_needs_the_key(server: Server) -> None:
    routes = [("GET", path) for path in ("/v1/models", "/metrics", "/explain", "/nowhere", "/docs")]
    for method, path in [*routes, ("POST", CHAT), ("POST", "/tokenize"), ("OPTIONS", "/v1/models")]:
        for headers in (
            {},
            {"Authorization": "Bearer"},
            {"Authorization": f"Basic {KEY}"},
            {"Authorization": f"Bearer {KEY}x"},
        ):
            answer = httpx.request(method, server.url + path, headers=headers)
            assert answer.status_code == 401, (method, path, headers)
            assert "access-control-allow-origin" not in answer.headers
    assert httpx.get(f"{server.url}/health").status_code == 200
    with server.client() as http:
        assert http.get("/nowhere").status_code == 404
        assert http.get(CHAT).status_code == 405


def test_leaving_early_at_every_stage(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    payload = json.dumps(body(400, stream=True)).encode()
    head = head_of(payload)
    for sent, wait in (
        (head[:20], 0),
        (head, 0),
        (head + payload[:10], 0),
        (head + payload, 0),
        (head + payload, 0.05),
    ):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(sent)
            time.sleep(wait)
            if wait:
                connection.recv(100)
    with server.client() as http, pytest.raises(httpx.ReadTimeout):
        http.post(CHAT, json=body(450, n=16), timeout=0.02)
    idle(server)


@pytest.mark.parametrize("stream", [False, True])
def test_who_closes_one_half_is_not_worked_for(server: Server, stream: bool) -> None:
    """A long answer that is on its way ends with whoever says that nothing more will come from them."""
    host, port = server.url.removeprefix("http://").split(":")
    payload = json.dumps(body(450, n=16, stream=stream)).encode()

    def left() -> float:
        with server.client() as http:
            lines = http.get("/metrics").text.splitlines()
        of_clients = 'slipstream_requests_failed_total{model_name="tiny",status="499"}'
        return sum(float(line.split()[-1]) for line in lines if line.startswith(of_clients))

    before, end = left(), time.monotonic() + 5
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head_of(payload) + payload)
        if stream:
            assert b" 200 " in connection.recv(100)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
    while left() == before and time.monotonic() < end:
        time.sleep(0.05)
    assert left() == before + 1
    idle(server)


def test_a_slow_reader_holds_up_nobody(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    payload = json.dumps(body(400, stream=True, n=4)).encode()
    head = head_of(payload)
    with socket.create_connection((host, int(port))) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.sendall(head + payload)
        with server.client() as http:
            for _ in range(5):
                assert http.post(CHAT, json=body(5)).status_code == 200
    idle(server)


def test_hundreds_of_connections(server: Server) -> None:
    """All are open before the first one asks."""
    address = server.url.removeprefix("http://").split(":")

    async def everybody() -> list[int]:
        payload = json.dumps(body(3)).encode()
        connections = [await asyncio.open_connection(address[0], int(address[1])) for _ in range(500)]
        for _, writer in connections:
            writer.write(head_of(payload) + payload)
        lines = await asyncio.wait_for(asyncio.gather(*(reader.readline() for reader, _ in connections)), 60)
        for _, writer in connections:
            writer.close()
        return [int(line.split()[1]) for line in lines]

    assert asyncio.run(everybody()) == [200] * 500
    idle(server)


@pytest.fixture
def own(tiny_gguf: Path, tmp_path: Path) -> Iterator[Server]:
    keys = {
        "whole": {"sha256": hashlib.sha256(KEY.encode()).hexdigest()},
        "limited": {
            "sha256": hashlib.sha256(LIMITED.encode()).hexdigest(),
            "requests_per_minute": 2,
            "max_concurrent": 1,
        },
    }
    file = tmp_path / "keys.json"
    file.write_text(json.dumps(keys))
    options = ("--threads", "1", "--max-queue", "4", "--request-timeout", "20")
    with checked(tiny_gguf, "--api-keys-file", str(file), *options) as running:
        yield running


LOAD_AND = 2.0
"""Seconds that an engine may take to be well again beside those of loading."""
WORKING = 3
"""Hundredths of a second of computing that no request takes but for its prompt."""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, float]]:
    """A server that computes at a long prompt for a while, and the seconds that it took to load."""
    path = tmp_path_factory.mktemp("slow") / "slow.gguf"
    write_tiny_gguf(path, hidden=512, layers=16)
    options = ("--api-key", KEY, "--threads", "1", "--kv-cache-gb", "0.1")
    with checked(path, *options):
        pass  # packs the weights and measures the machine, which a restart need not
    begun = time.monotonic()
    with checked(path, *options) as running:
        yield running, time.monotonic() - begun


def kept() -> dict[Path, int]:
    """Packed weights and fitted costs on disk, each file as it was written."""
    folders = (cache_folder() / name for name in ("packed", "cost"))
    return {path: path.stat().st_ino for folder in folders for path in folder.glob("*")}


def streamed(http: httpx.Client, request: dict[str, object], speaks: threading.Event) -> str:
    """All that is said of a request; `speaks` is set with the first token."""
    pieces = []
    with http.stream("POST", CHAT, json=request) as answer:
        for piece in answer.iter_text():
            pieces.append(piece)
            if re.search(r'"content": ?"[^"]', piece):
                speaks.set()
    return "".join(pieces)


@pytest.mark.parametrize("phase", ["waiting", "prompt", "answer"])
def test_the_engine_is_killed(slow: tuple[Server, float], phase: str) -> None:
    """At a known point: who waits is told, in a stream and outside of one, and it is well again soon."""
    server, loading = slow
    before_it = kept()
    speaks, pid = threading.Event(), server.engine_pid()
    long = [{"role": "user", "content": 400 * phase[0]}] if phase == "prompt" else [{"role": "user", "content": phase}]
    whole, parts = body(90, messages=long, n=2), body(90, messages=long, stream=True)
    with server.client() as http, ThreadPoolExecutor(2) as pool:
        if phase == "waiting":
            os.kill(pid, signal.SIGSTOP)
        before = ticks(pid)
        asked = pool.submit(http.post, CHAT, json=whole)
        heard = pool.submit(streamed, http, parts, speaks)
        match phase:
            case "waiting":
                time.sleep(0.2)
            case "prompt":
                while ticks(pid) - before < WORKING:
                    time.sleep(0.001)
            case _:
                assert speaks.wait(20)
        server.kill_engine()
        answer, text = asked.result(20), heard.result(20)
        ended = time.monotonic()
        ill = httpx.get(f"{server.url}/health")
        assert (ill.status_code, "does not answer" in ill.text) == (503, True)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert "ended unexpectedly" in answer.json()["error"]["message"]
        assert "ended unexpectedly" in text
        assert "[DONE]" not in text
        assert speaks.is_set() == (phase == "answer"), "it was where it should be"
        server.wait_until_ready(30)
        assert time.monotonic() - ended < loading + LOAD_AND
        assert kept() == before_it != {}, "what was packed and measured is read again, not made again"
        assert server.engine_pid() != pid
        assert http.post(CHAT, json=body(3)).status_code == 200


def test_limits_of_keys_and_queue(own: Server) -> None:
    headers = {"Authorization": f"Bearer {LIMITED}"}
    seen = [httpx.post(own.url + CHAT, json=body(2), headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in seen] == [200, 200, 429]
    assert int(seen[2].headers["retry-after"]) >= 1
    with own.client() as http:
        many = http.post("/v1/completions", json={"prompt": ["x"] * 3, "max_tokens": 2})
        assert (many.status_code, "at most 2 prompts" in many.text) == (400, True), "half of a queue of 4"
        os.kill(own.engine_pid(), signal.SIGSTOP)
        asking = [threading.Thread(target=http.post, args=(CHAT,), kwargs={"json": body(2)}) for _ in range(2)]
        for thread in asking:
            thread.start()
        time.sleep(0.5)
        refused = http.post(CHAT, json=body(2))
        os.kill(own.engine_pid(), signal.SIGCONT)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "of the queue's 4 places" in refused.text
        for thread in asking:
            thread.join(20)


def test_sigterm_drains(tiny_gguf: Path) -> None:
    server = start(tiny_gguf, "--threads", "1")
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(server.url + CHAT, json=body(450, n=8), timeout=60))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.15)
    os.kill(server.engine_pid(), signal.SIGTERM)  # service managers signal all processes of a service
    server.process.send_signal(signal.SIGTERM)
    asking.join(60)
    assert server.process.wait(30) == 0
    assert [answer.status_code for answer in answers] == [200], "what was open is answered"
    assert len(answers[0].json()["choices"]) == 8


def test_what_was_expected_and_what_came(tiny_gguf: Path) -> None:
    server = start(tiny_gguf, "--explain", "--kv-cache-gb", "0.01", "--kv-offload-gb", "0.002", "--api-key", KEY)
    try:
        said = "".join(server.log)
        assert "10 MB cache + 2 MB for what is moved out of it" in said
        assert "first bottleneck" in said
        with server.client() as http:
            assert http.post(CHAT, json=body(20)).status_code == 200
            assert 'num_cpu_blocks="' in http.get("/metrics").text
    finally:
        stop(server)
    end = time.monotonic() + 5
    while "the median of 1 answers got" not in "".join(server.log) and time.monotonic() < end:
        time.sleep(0.05)
    assert "the median of 1 answers got" in "".join(server.log)


@pytest.mark.parametrize(
    "options",
    [("--host", "0.0.0.0"), ("--api-key", "short"), ("--max-queue", "0"), ("--kv-cache-gb", "0.0000001"),
     ("--api-keys-file", "/nonexistent"), ("--host", "203.0.113.1", "--insecure"), ("--max-model-len", "100000"),
     ("--max-num-seqs", "0"), ("--tpot-target", "nan"), ("--ttft-target", "-1"), ("--drain-timeout", "inf"),
     ("--port", "70000")]
)  # fmt: skip
def test_wrong_use(tiny_gguf: Path, options: tuple[str, ...]) -> None:
    out = subprocess.run(
        [*COMMAND, str(tiny_gguf), "--port", "0", *options], capture_output=True, text=True, timeout=60
    )
    assert out.returncode == 2, out.stderr
    assert "Traceback" not in out.stderr


def test_an_unknown_instruction_set(tiny_gguf: Path) -> None:
    command = [sys.executable, "-m", "slipstream", "generate", str(tiny_gguf), "-p", "x"]
    environment = {**os.environ, "SLIPSTREAM_ISA": "abacus"}
    out = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert out.returncode == 2, out.stderr
    assert "SLIPSTREAM_ISA" in out.stderr
    assert "Traceback" not in out.stderr


def test_explain_a_live_server(server: Server) -> None:
    with server.client() as http:
        assert http.post(CHAT, json=body(80)).status_code == 200
    command = [sys.executable, "-m", "slipstream", "explain", server.url, "--json"]
    out = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "SLIPSTREAM_API_KEY": KEY}, timeout=60
    )
    assert out.returncode == 0, out.stderr
    report = json.loads(out.stdout)
    assert sum(report["parts"].values()) == pytest.approx(report["seconds_per_token"])
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "401" in refused.stderr
