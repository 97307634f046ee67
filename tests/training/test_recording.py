"""Recording over HTTP: exactly what was asked for is in the file, and a full disk ends nothing but recording."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream.training.records import Record
from slipstream.training.store import TrafficStore
from tests.serving import conftest as serving
from tests.serving.conftest import Server, start, stop

SECRETS = {"always": "a-key-that-says-yes", "never": "a-key-that-says-no", "unsaid": "a-key-that-says-nothing"}
SAYS = {"always": True, "never": False, "unsaid": None}
HEADERS = (None, "on", "off", "ON", "whatever")
SMALL = ("--kv-cache-gb", "0.02", "--max-model-len", "256", "--threads", "1")


@pytest.fixture(params=["", ",asked"])
def recording(request: pytest.FixtureRequest, tiny_gguf: Path, tmp_path: Path) -> Iterator[tuple[Server, Path, bool]]:
    """A server with keys that say yes, no and nothing; its file; whether only what asks is recorded."""
    entries = {
        name: {"sha256": hashlib.sha256(secret.encode()).hexdigest()}
        | ({"record": SAYS[name]} if SAYS[name] is not None else {})
        for name, secret in SECRETS.items()
    }
    (tmp_path / "keys.json").write_text(json.dumps(entries))
    traffic = tmp_path / "t.db"
    server = start(
        tiny_gguf, *SMALL, "--api-keys-file", str(tmp_path / "keys.json"), "--record", f"{traffic}{request.param}"
    )
    yield server, traffic, bool(request.param)
    stop(server)


def ask(url: str, key: str | None, path: str, body: dict[str, Any], header: str | None = None) -> httpx.Response:
    headers = {"X-Slipstream-Tag": f"{key}/{header}"}
    if key is not None:
        headers["Authorization"] = f"Bearer {SECRETS[key]}"
    if header is not None:
        headers["X-Slipstream-Record"] = header
    answer = httpx.post(url + path, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.features("recording", "keys")
def test_exactly_what_opted_in_is_recorded(recording: tuple[Server, Path, bool]) -> None:
    """A key that says no rules it out; then the header decides, then the key, then the rule of the server."""
    server, traffic, asked = recording
    bodies: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/completions", {"prompt": "abc", "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 4, "stream": True}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 4}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
    )
    expected: list[tuple[str, str]] = []
    for key in SECRETS:
        for header in HEADERS:
            wanted = {None: SAYS[key] if SAYS[key] is not None else not asked, "on": True, "ON": True}.get(
                header, False
            ) and SAYS[key] is not False
            for path, body in bodies:
                ask(server.url, key, path, {"model": "tiny", "ignore_eos": True, **body}, header)
                expected += [(key, f"{key}/{header}")] if wanted else []
    stop(server)
    with TrafficStore(traffic) as store:
        found = sorted((record.key, record.tag) for record in store.records())
    assert found == sorted(expected)
    assert {key for key, _ in found} == {"always", "unsaid"}


def test_what_restricted_an_answer_is_recorded(tiny_gguf: Path, tmp_path: Path) -> None:
    """As numbers: the bias itself and the grammar's text stay out."""
    server = start(tiny_gguf, *SMALL, "--record", str(tmp_path / "t.db"))
    try:
        for tag, more in (
            ("bias", {"logit_bias": {"97": 5, "98": -100}}), ("least", {"min_tokens": 3}),
            ("form", {"guided_regex": "[abc]{3}"}), ("none", {}),
        ):  # fmt: skip
            body = {"prompt": "abc", "max_tokens": 8, "temperature": 0, **more}
            headers = {"X-Slipstream-Tag": tag}
            assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
    finally:
        stop(server)
    with TrafficStore(tmp_path / "t.db") as store:
        found = {record.tag: dict(record.settings) for record in store.records()}
    greedy = {"temperature": 0.0}
    assert found == {
        "bias": greedy | {"logit_bias": 2.0}, "least": greedy | {"min_tokens": 3.0}, "form": greedy | {"grammar": 1.0},
        "none": greedy,
    }  # fmt: skip


FULL = """
import slipstream.training.store as store
opened = store.TrafficStore._open

def small(self):
    opened(self)
    pages = self._db.execute("PRAGMA page_count").fetchone()[0]
    self._db.execute(f"PRAGMA max_page_count = {pages + 2}")

store.TrafficStore._open = small
from slipstream.cli import main
main()
"""
"""The server's program on a disk that has room for two more pages."""


def figure(url: str, name: str) -> float:
    found = re.search(rf"^{name}(?:_total)?(?:{{.*}})? (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_a_full_disk_stops_recording_and_not_serving(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "COMMAND", [sys.executable, "-c", FULL, "serve"])
    server = start(tiny_gguf, *SMALL, "--record", str(tmp_path / "t.db"))

    def answer(number: int) -> str:
        body = {"prompt": f"abc {number}", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        got = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert got.status_code == 200, got.text
        return str(got.json()["choices"][0]["text"])

    try:
        assert figure(server.url, "slipstream_recording") == 1
        before = [answer(number) for number in range(4)]
        asked, deadline = 4, time.monotonic() + 60
        while figure(server.url, "slipstream_recording") == 1 and time.monotonic() < deadline:
            answer(asked)
            asked += 1
        assert figure(server.url, "slipstream_recording") == 0
        written = figure(server.url, "slipstream_recorded")
        assert 0 < written < asked
        assert any("recording has stopped, serving goes on" in line and "full" in line for line in server.log)
        assert [answer(number) for number in range(4)] == before
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert figure(server.url, "slipstream_recorded") == written
    finally:
        stop(server)
    with TrafficStore(tmp_path / "t.db") as store:
        kept: list[Record] = list(store.records())
        assert store._db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert len(kept) == written
    assert all(record.answered == 60 for record in kept)
