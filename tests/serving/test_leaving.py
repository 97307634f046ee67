"""Clients that leave while they wait, at a known point: nothing more is done for them, and others notice nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import write_tiny_gguf
from tests.serving.conftest import KEY, Server, checked
from tests.serving.test_faults import CHAT, body, head_of

STATS = 1.2
"""Seconds after which the figures of /metrics are newer: the engine is asked for them every second."""
PROMPT = 440
"""Letters, and so tokens, of a long prompt: many steps of it beside a stream."""
SHORT = 60
"""More than the tokens of everybody else's prompts."""
ROWS = "slipstream_rows_total prefill"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two places; it computes at a long prompt for a while."""
    path = tmp_path_factory.mktemp("slow") / "slow.gguf"
    write_tiny_gguf(path, hidden=512, layers=16)
    options = ("--threads", "1", "--kv-cache-gb", "0.1", "--max-num-seqs", "2")
    with checked(path, "--api-key", KEY, *options) as running:
        yield running


def figures(server: Server) -> dict[str, float]:
    """/metrics by name; of those that tell a kind or a status, each."""
    with server.client() as http:
        lines = [line for line in http.get("/metrics").text.splitlines() if line[0] != "#"]
    found = {}
    for line in lines:
        kind = re.search(r'\b(?:kind|status)="([^"]*)"', line)
        found[line.partition("{")[0].partition(" ")[0] + (f" {kind[1]}" if kind else "")] = float(
            line.rpartition(" ")[2]
        )
    return found


def ask(server: Server, **fields: Any) -> socket.socket:
    """A request whose answer nobody has read yet."""
    host, port = server.url.removeprefix("http://").split(":")
    payload = json.dumps(body(**fields)).encode()
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(head_of(payload) + payload)
    return connection


@contextlib.contextmanager
def stopped(server: Server) -> Iterator[None]:
    """The engine stands still where it is."""
    pid = server.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Other:
    """Somebody else's stream that goes on meanwhile, of one answer or several; to its end, or until it is left."""

    def __init__(self, server: Server, choices: int = 1):
        self.http = server.client()
        self.answer = self.http.send(
            self.http.build_request("POST", CHAT, json=body(480, stream=True, n=choices)), stream=True
        )
        self.lines = self.answer.iter_lines()
        self.wait(1)

    def wait(self, tokens: int) -> None:
        """Until so many more have come."""
        while tokens:
            tokens -= '"content":"' in next(self.lines).replace('": "', '":"')

    def end(self) -> None:
        """All of the rest has come."""
        assert list(self.lines)[-2] == "data: [DONE]"
        self.http.close()


def left(server: Server) -> float:
    """How many clients have left, as the server knows."""
    return figures(server).get("slipstream_requests_failed_total 499", 0.0)


def leave(server: Server, connection: socket.socket, before: float) -> None:
    """Close a connection, and wait until the server has seen it."""
    connection.close()
    end = time.monotonic() + 20
    while left(server) == before:
        assert time.monotonic() < end, "the server does not see that a client left"
        time.sleep(0.01)
    assert left(server) == before + 1


class Left:
    """What it comes to when somebody leaves: `rows` of prompts were computed meanwhile."""

    rows: float


@contextlib.contextmanager
def leaving(server: Server) -> Iterator[Left]:
    """Nothing is left of anybody when it is over: no sequence, no block; and the next one is answered."""
    time.sleep(STATS)
    before, result = figures(server), Left()
    yield result
    time.sleep(STATS)
    now = figures(server)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [now[f"vllm:{name}"] for name in names] == [0.0] * 3
    result.rows = now.get(ROWS, 0.0) - before.get(ROWS, 0.0)
    with server.client() as http:
        assert http.post(CHAT, json=body(3)).status_code == 200


def long(number: int, **fields: Any) -> dict[str, Any]:
    """A request with a long prompt, none of which is known."""
    return {"messages": [{"role": "user", "content": f"{number:04d}" + "y" * PROMPT}], "tokens": 9, **fields}


@pytest.mark.parametrize("stream", [False, True])
def test_while_queued(server: Server, stream: bool) -> None:
    """Both places are taken for as long as he waits."""
    with leaving(server) as result:
        before, other = left(server), Other(server, choices=2)
        waiting = ask(server, **long(1000 + stream, stream=stream))
        other.wait(20)
        leave(server, waiting, before)
        other.end()
    assert result.rows < SHORT, "it never came to him"


@pytest.mark.parametrize("stream", [False, True])
def test_in_the_middle_of_a_prompt(server: Server, stream: bool) -> None:
    """The engine stands still there until the server has seen it; what was left of the prompt is not computed."""
    seen = []
    for steps in range(8, 80, 8):
        with leaving(server) as result:
            before, other = left(server), Other(server)
            waiting = ask(server, **long(2000 + 2 * steps + stream, stream=stream))
            other.wait(steps)
            with stopped(server):
                leave(server, waiting, before)
            other.end()
        seen.append(result.rows)
        if SHORT < result.rows < PROMPT:
            return
    raise AssertionError(f"it was never in the middle: {seen}")


def test_while_its_grammar_is_compiled(server: Server) -> None:
    """The engine hears of the request and that it is gone at once: its grammar is being compiled then."""
    with leaving(server) as result:
        before, other = left(server), Other(server)
        for number in range(3):
            schema = {"type": "object", "properties": {f"{number} {at}": {"type": "string"} for at in range(300)}}
            form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
            with stopped(server):
                leave(server, ask(server, **long(3000 + number, response_format=form)), before + number)
        other.end()
    assert result.rows < SHORT, "it never came to him"
