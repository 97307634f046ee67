"""A server on a tiny model, for as long as a module's tests run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

COMMAND = [sys.executable, "-m", "slipstream", "serve"]
KEY, LIMITED = "a-key-for-tests", "another-key-for-tests"


@dataclass
class Server:
    """A running `slipstream serve`."""

    process: subprocess.Popen[str]
    url: str
    log: list[str] = field(default_factory=list)
    kills: int = 0
    """Times that a test ended the engine."""

    def client(self, **options: object) -> httpx.Client:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)  # type: ignore[arg-type]

    def engine_pid(self) -> int:
        """The engine's process: the server's only child."""
        out = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=True)
        return int(out.stdout.split()[0])

    def kill_engine(self) -> None:
        os.kill(self.engine_pid(), signal.SIGKILL)
        self.kills += 1

    def check(self) -> None:
        """The engine, which ends when it finds its blocks in disorder, was never started again but after a kill."""
        with self.client() as http:
            said = re.search(r"^slipstream_engine_restarts.* (\S+)$", http.get("/metrics").text, re.MULTILINE)
        assert said is not None
        assert float(said[1]) == self.kills, "".join(self.log)

    def wait_until_ready(self, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if httpx.get(f"{self.url}/health").status_code == 200:
                return
            time.sleep(0.05)
        raise TimeoutError("\n".join(self.log))


def start(model: Path, *options: str) -> Server:
    """Start a server on a free port and wait until it says where it is."""
    command = [*COMMAND, str(model), "--port", "0", "--served-model-name", "tiny", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stderr is not None
    log: list[str] = []
    for line in process.stderr:
        log.append(line)
        if match := re.search(r"http://127\.0\.0\.1:\d+", line):
            server = Server(process, match[0], log)
            threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True).start()
            server.wait_until_ready()
            return server
    raise AssertionError("".join(log))


def stop(server: Server) -> None:
    """End it and whatever it started."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        try:
            server.process.wait(20)
        except subprocess.TimeoutExpired:
            server.process.kill()
            raise


@contextmanager
def checked(model: Path, *options: str) -> Iterator[Server]:
    """A server that is found well at the end, and ended."""
    running = start(model, *options)
    try:
        yield running
        running.check()
    finally:
        stop(running)


@pytest.fixture(scope="module")
def server(tiny_gguf: Path) -> Iterator[Server]:
    with checked(tiny_gguf, "--api-key", KEY, "--threads", "1", "--kv-cache-gb", "0.01") as running:
        yield running


@pytest.fixture(scope="session")
def real_server(smollm: Path) -> Iterator[Server]:
    """A real model, for whatever needs sense: tools, structured answers, other protocols."""
    with checked(smollm, "--api-key", KEY, "--kv-cache-gb", "0.2", "--max-model-len", "2048") as running:
        yield running
