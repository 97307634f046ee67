"""A server whose engine is busy or stuck: it answers what it can, ends what is late, and leaves when it is told to."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.serving.conftest import KEY, Server, start, stop

PROMPT = "/v1/completions"
LATE = 0.5


@pytest.fixture
def own(tiny_gguf: Path) -> Iterator[Server]:
    running = start(tiny_gguf, "--api-key", KEY, "--threads", "1", "--request-timeout", str(LATE))
    yield running
    stop(running)


def body(**more: object) -> dict[str, object]:
    return {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, **more}


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """An engine that is there but does nothing: the utmost of being busy."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def ask(server: Server, into: list[str], **more: object) -> threading.Thread:
    def run() -> None:
        with server.client() as http:
            answer = http.post(PROMPT, json=body(**more))
            into.append(f"{answer.status_code} {answer.text}")

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("stream", [False, True])
def test_late_answers_end(own: Server, stream: bool) -> None:
    said: list[str] = []
    with stopped(own.engine_pid()):
        asking = ask(own, said, stream=stream)
        time.sleep(2 * LATE)
    asking.join(20)
    assert "took more than 0.5 s" in said[0]
    assert said[0].startswith("200" if stream else "504")
    with own.client() as http:
        assert http.post(PROMPT, json=body(max_tokens=2)).status_code == 200
        assert 'status="504"' in http.get("/metrics").text


def test_what_needs_no_engine_is_answered_beside_it(own: Server) -> None:
    said: list[str] = []
    with stopped(own.engine_pid()), own.client() as http:
        asking = ask(own, said)
        for path in ("/v1/models", "/version", "/metrics", "/openapi.json"):
            assert http.get(path, timeout=5).status_code == 200, path
        assert http.post("/tokenize", json={"prompt": "abc"}, timeout=5).json()["count"] == 3
        assert http.post(PROMPT, json=body(temperature=-1), timeout=5).status_code == 400
        assert not said
    asking.join(20)
    assert said


def test_nobody_waits_for_ever_when_it_leaves(tiny_gguf: Path) -> None:
    """While it waits for what is open it says so, and takes nothing new; what is not done by then is cut off."""
    server = start(tiny_gguf, "--api-key", KEY, "--threads", "1", "--drain-timeout", "4")
    said: list[str] = []
    pid = server.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    asking = ask(server, said)
    time.sleep(1.0)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    health = httpx.get(f"{server.url}/health", timeout=5)
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    with server.client() as http:
        late = http.post(PROMPT, json=body())
    assert (late.status_code, "going away" in late.text) == (503, True)
    assert server.process.wait(20) == 0
    asking.join(5)
    assert len(said) == 1
    assert said[0].startswith("503")
    assert "went away before" in said[0]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_was_asked_is_not_in_the_log(tiny_gguf: Path) -> None:
    """Not of answers that went well, nor of refused ones, nor of those that an engine died over."""
    secret = "xyzzy-plugh"
    server = start(tiny_gguf, "--api-key", KEY, "--threads", "1")
    try:
        with server.client() as http:
            for fields in ({"max_tokens": 4}, {"temperature": -1}, {"stop": [3]}, {"max_tokens": 10**9}):
                http.post(PROMPT, json=body(prompt=secret, **fields))
            http.post("/v1/chat/completions", json={"messages": [{"role": secret, "content": secret}], "max_tokens": 2})
            http.post(PROMPT, content=f'{{"prompt": "{secret}"'.encode())
            http.get(f"/{secret}")
            killer = threading.Timer(0.1, os.kill, (server.engine_pid(), signal.SIGKILL))
            killer.start()
            http.post(PROMPT, json=body(prompt=secret, n=16))
            killer.join()
        server.wait_until_ready(20)
    finally:
        stop(server)
    log = "".join(server.log)
    assert "engine" in log
    assert secret not in log
