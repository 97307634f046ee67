"""Drift is told by tag; a training runs only while the server is idle; what is surely better is deployed."""

from __future__ import annotations

import json
import random
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.drafter_deploy import _renew
from slipstream.errors import SlipstreamError
from slipstream.training import idle
from slipstream.training.drift import drift
from slipstream.training.idle import run_when_idle
from slipstream.training.remote import Server


def served(tag: str, chance: float, rng: random.Random) -> tuple[str, list[int]]:
    """An answer whose steps brought two tokens with a chance."""
    return tag, [1] + [2 if rng.random() < chance else 1 for _ in range(40)]


def test_drift_is_seen_where_it_is() -> None:
    rng = random.Random(0)
    records = []
    for number in range(600):
        records.append(served("steady", 0.6, rng))
        records.append(served("changed", 0.6 if number < 480 else 0.35, rng))
    records += [served("rare", 0.5, rng) for number in range(12)]
    found = {one.tag: one for one in drift(records)}
    assert found.keys() == {"steady", "changed"}
    assert found["changed"].drifted
    assert not found["steady"].drifted
    assert 1.5 < found["steady"].earlier < 1.7
    assert found["changed"].recent < found["changed"].earlier - 0.15


def test_an_answer_whose_steps_are_not_known_says_nothing() -> None:
    assert drift([("", ())] * 999) == []


def test_a_command_is_held_while_the_server_is_busy(tmp_path: Path) -> None:
    ticks = tmp_path / "ticks"
    program = (
        "import time, os\n"
        f"with open({str(ticks)!r}, 'a') as f:\n"
        "    for _ in range(60):\n        time.sleep(0.02); f.write(f'{time.monotonic()} {os.nice(0)}\\n'); f.flush()\n"
    )
    begun = time.monotonic()

    def busy() -> bool:
        return 0.4 < time.monotonic() - begun < 2.0

    status, spent = run_when_idle([sys.executable, "-c", program], busy, quiet=0.3)
    lines = [line.split() for line in ticks.read_text().splitlines()]
    assert status == 0
    assert len(lines) == 60
    assert {nice for _, nice in lines} == {"19"}
    times = [float(when) for when, _ in lines]
    longest = max(b - a for a, b in pairwise(times))
    assert longest > 1.2
    assert spent.held > 1.2
    assert not any(begun + 1.0 < when < begun + 2.0 for when in times)


METRICS = (
    'vllm:num_requests_running{{model_name="m"}} {running}\nvllm:num_requests_waiting{{model_name="m"}} 0\n'
    'vllm:generation_tokens_total{{model_name="m"}} {tokens}\n'
)


def test_a_server_is_busy_that_was_since_it_was_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short requests come and go between two looks."""
    server, said = Server("http://127.0.0.1:1"), {"running": 0, "tokens": 5}
    monkeypatch.setattr(Server, "_ask", lambda *_, **__: METRICS.format(**said).encode())
    assert [server.busy(), server.busy()] == [False, False]
    said["tokens"] = 9
    assert [server.busy(), server.busy()] == [True, False]
    said["running"] = 1
    assert server.busy()


def test_a_server_that_refuses_is_not_taken_for_a_busy_one(tmp_path: Path) -> None:
    """The command would be held for ever, and nobody would know why."""

    def refuse(self: Server, *_: object, **__: object) -> bytes:
        raise SlipstreamError("http://127.0.0.1:1: no such key")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "_ask", refuse)
        with pytest.raises(SlipstreamError, match="no such key"):
            run_when_idle([sys.executable, "-c", "import time; time.sleep(60)"], Server("http://127.0.0.1:1").busy)
    assert Server("http://127.0.0.1:9").busy(), "nobody is there"


def test_a_command_that_fails_says_so() -> None:
    assert run_when_idle([sys.executable, "-c", "raise SystemExit(3)"], lambda: False)[0] == 3


@pytest.mark.parametrize(
    ("tau", "low", "status", "deployed"), [(2.0, 1.9, 0, True), (2.0, 1.4, 0, False), (2.0, 1.9, 1, False)]
)
def test_only_what_is_surely_better_is_deployed(
    tau: float, low: float, status: int, deployed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    asked: list[Any] = []
    folder.mkdir()
    replayed = {
        "mine": {"": {"tau": tau, "interval": [low, 2.1]}},
        "suffix": {"": {"tau": 1.5, "interval": [1.4, 1.6]}},
    }
    (folder / "eval.json").write_text(json.dumps({"replayed": replayed}))
    monkeypatch.setattr(idle, "run_when_idle", lambda command, busy: (status, idle.Spent()))
    at = Server("http://nowhere")
    monkeypatch.setattr(Server, "deploy", lambda self, *arguments, auto: asked.append((arguments, auto)))
    _renew(at, "model", tmp_path / "traffic.db", folder, "1m")
    assert asked == ([((str(folder), "shadow", 0.1), True)] if deployed else [])
