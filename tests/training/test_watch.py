"""Drift is told by tag; a training runs only while the server is idle; what is surely better is deployed."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream.cli import drafter_deploy
from slipstream.cli.drafter_deploy import Retraining, _renew
from slipstream.errors import SlipstreamError, UsageError
from slipstream.speculation.dspark_model import read_dspark
from slipstream.training import idle
from slipstream.training.drift import drift
from slipstream.training.idle import run_when_idle
from slipstream.training.records import Record
from slipstream.training.remote import Server
from slipstream.training.store import TrafficStore
from slipstream.weights.open import open_checkpoint
from tests.serving.conftest import start, stop
from tests.speculation.folders import dspark_folder, eagle3_folder


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

    def busy(wait: float) -> bool:
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


def test_a_server_is_busy_that_was_since_it_was_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short requests come and go between two looks."""
    server, said, asked = Server("http://127.0.0.1:1"), {"open": 0, "begun": 5}, list[tuple[str, float]]()

    def answer(self: Server, path: str, seconds: float) -> bytes:
        asked.append((path, seconds))
        return json.dumps(said).encode()

    monkeypatch.setattr(Server, "_ask", answer)
    assert [server.busy(), server.busy(4.5)] == [False, False]
    said["begun"] = 9
    assert [server.busy(), server.busy()] == [True, False]
    said["open"] = 1
    assert server.busy()
    said |= {"open": 0, "begun": 0}
    assert [server.busy(), server.busy()] == [True, False], "it was started again"
    paths = [path.removeprefix("/admin/activity?") for path, _ in asked]
    assert paths[:3] == ["wait=0", "wait=4.5&since=5", "wait=0&since=5"]
    assert asked[1][1] > 4.5
    said.clear()
    with pytest.raises(SlipstreamError, match="as slipstream serve does"):
        server.busy()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system does not show what a process does")
def test_a_command_stops_while_the_request_is_still_open(tiny_gguf: Path, tmp_path: Path) -> None:
    """It is told so; the next look would come much later."""
    own, over = tmp_path / "pid", False

    def state() -> str:
        return Path(f"/proc/{own.read_text()}/stat").read_text().rpartition(")")[2].split()[0]

    def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 15
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    running = start(tiny_gguf, "--kv-cache-gb", "0.02", "--max-model-len", "256")
    engine, at = running.engine_pid(), Server(running.url)

    def busy(wait: float) -> bool:
        if over:
            raise SlipstreamError("over")
        return at.busy(30.0 if wait else 0.0)

    command = ["sh", "-c", f"printf $$ > {own}.new; mv {own}.new {own}; exec sleep 600"]
    with ThreadPoolExecutor(2) as pool:
        ended = pool.submit(run_when_idle, command, busy, 0.3)
        try:
            until(lambda: own.exists() and state() == "S")
            time.sleep(0.4)  # most likely the server is being asked now
            os.kill(engine, signal.SIGSTOP)  # who asks it now is not answered yet
            try:
                answered = pool.submit(httpx.post, f"{running.url}/v1/completions", json={"prompt": "a"}, timeout=60)
                until(lambda: state() == "T")
                assert not answered.done()
            finally:
                os.kill(engine, signal.SIGCONT)
            assert answered.result().status_code == 200
            until(lambda: state() == "S")
        finally:
            over = True
            stop(running)
        with pytest.raises(SlipstreamError, match="over"):
            ended.result(30)


def test_a_request_is_waited_for_while_the_command_runs() -> None:
    """Instead of looking again and again; not while it is held, nor for long, as it may end."""
    waits, answers = list[float](), [False, True, False, False]

    def busy(wait: float) -> bool:
        waits.append(wait)
        if not answers:
            raise SlipstreamError("over")
        return answers.pop(0)

    with pytest.raises(SlipstreamError, match="over"):
        run_when_idle(["sleep", "600"], busy, quiet=1e-6)
    assert waits == [idle.WAIT, idle.WAIT, 0.0, idle.WAIT, idle.WAIT]
    assert idle.WAIT <= 2.0


def test_a_server_that_answers_early_is_not_asked_all_the_time() -> None:
    """One that is busy, and one that is going away and waits for nobody."""
    looks = list[float]()

    def busy(wait: float) -> bool:
        looks.append(time.monotonic())
        return len(looks) < 3

    assert run_when_idle(["sleep", "1.5"], busy, quiet=1e-6)[0] == 0
    assert len(looks) > 3
    assert min(b - a for a, b in pairwise(looks)) > 0.9 * idle.EVERY


def test_a_server_that_refuses_is_not_taken_for_a_busy_one(tmp_path: Path) -> None:
    """The command would be held for ever, and nobody would know why."""

    def refuse(self: Server, *_: object, **__: object) -> bytes:
        raise SlipstreamError("http://127.0.0.1:1: no such key")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "_ask", refuse)
        with pytest.raises(SlipstreamError, match="no such key"):
            run_when_idle([sys.executable, "-c", "import time; time.sleep(60)"], Server("http://127.0.0.1:1").busy)
    assert Server("http://127.0.0.1:9").busy(), "nobody is there"


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="this system has no such policy")
def test_it_runs_where_nobody_else_wants_to(tmp_path: Path) -> None:
    """So do threads that it starts."""
    said = tmp_path / "said"
    program = (
        "import os, threading, time; time.sleep(0.5); found = [os.sched_getscheduler(0)]\n"
        "thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(threading.get_native_id())))\n"
        f"thread.start(); thread.join(); open({str(said)!r}, 'w').write(repr(found))"
    )
    assert run_when_idle([sys.executable, "-c", program], lambda wait: False)[0] == 0
    assert said.read_text() == repr([os.SCHED_IDLE] * 2)


def test_a_command_that_fails_says_so() -> None:
    assert run_when_idle([sys.executable, "-c", "raise SystemExit(3)"], lambda wait: False)[0] == 3


@pytest.mark.parametrize(
    ("low", "present", "fails", "deployed"),
    [
        (1.9, 1.7, "", True), (1.4, 1.2, "", False), (1.9, 1.95, "", False), (1.9, None, "", True),
        (1.9, 1.7, "train", False), (1.9, 1.7, "eval", False),
    ],
)  # fmt: skip
def test_only_what_is_surely_better_is_deployed(
    low: float, present: float | None, fails: str, deployed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Better than drafting from text, and than the drafter at work, which it is measured beside, and not timed: it is
    stopped for others. Measuring fails where drafts depend on what is not known yet.
    """
    folder, asked, commands = tmp_path / "mine", list[Any](), list[list[str]]()
    folder.mkdir()
    replayed = {
        "mine": {"": {"tau": 2.0, "interval": [low, 2.1]}},
        "suffix": {"": {"tau": 1.5, "interval": [1.4, 1.6]}},
    }
    if present is not None:
        replayed["present"] = {"": {"tau": present, "interval": [1.0, 3.0]}}
    (folder / "eval.json").write_text(json.dumps({"replayed": replayed}))

    def ran(command: list[str], busy: Any) -> tuple[int, idle.Spent]:
        commands.append(command[4:])
        return int(commands[-1][0] == fails), idle.Spent()

    monkeypatch.setattr(idle, "run_when_idle", ran)
    monkeypatch.setattr(Server, "deploy", lambda self, *arguments, auto: asked.append((arguments, auto)))
    how = Retraining(("--quantization", "int4"), ("--kind", "dspark"), "at/present" if present is not None else None)
    _renew(Server("http://nowhere"), "model", tmp_path / "traffic.db", folder, "1m", how)
    assert asked == ([((str(folder), "shadow", 0.1), True)] if deployed else [])
    train, *measured = commands
    assert train[0] == "train"
    assert "--kind dspark" in " ".join(train)
    assert len(measured) == (fails != "train")
    for command in commands:
        assert "--quantization int4" in " ".join(command)
    for command in measured:
        assert command[0] == "eval"
        assert "--serve-limit 0" in " ".join(command)
        assert ("--against at/present" in " ".join(command)) == (present is not None)


@pytest.mark.parametrize(
    ("auto", "late", "least", "trains"),
    [(True, 0.35, 1 << 40, True), (True, 0.6, 1 << 40, False), (True, 0.6, 1000, True), (False, 0.35, 1, False)],
)
def test_drift_is_a_reason_to_train(
    auto: bool, late: float, least: int, trains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """As are many new tokens, where it is told to; what was trained before knows nothing of either."""
    rng, path = random.Random(0), tmp_path / "t.db"
    with TrafficStore(path) as store:
        for number in range(600):
            tag, steps = served("maths", 0.6 if number < 480 else late, rng)
            tokens = (1, *range(sum(steps)))
            spans = ((1, len(tokens)),)
            store.add([Record(tokens, spans, "t", tag=tag, time=1e9 + number, request=str(number), steps=tuple(steps))])
    asked = list[Path]()
    monkeypatch.setattr(drafter_deploy, "_renew", lambda at, model, traffic, *rest: asked.append(traffic))
    monkeypatch.setattr(Retraining, "like", classmethod(lambda cls, *rest: cls((), ())))
    monkeypatch.setattr(Server, "drafter", lambda self: {})
    monkeypatch.setattr(signal, "signal", lambda *rest: None)
    told: dict[str, Any] = {"auto": auto, "least_tokens": least, "once": True, "json_output": True}
    drafter_deploy.watch("model", path, out=tmp_path / "drafters", **told)
    assert asked == [path] * trains
    (tag,) = json.loads(capsys.readouterr().out)["tags"]
    assert tag["drifted"] is (late < 0.6)
    card = tmp_path / "drafters" / "newest" / "training-card.json"
    card.parent.mkdir(parents=True)
    card.write_text(json.dumps({"newest": 2e9}))
    asked.clear()
    drafter_deploy.watch("model", path, out=tmp_path / "drafters", **told)
    assert asked == []


def test_a_successor_is_as_the_drafter_at_work(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = {"kv_cache_dtype": "int8", "quantization": "int4"}
    eagle, dspark = str(eagle3_folder(tmp_path / "eagle")), str(dspark_folder(tmp_path / "dspark"))
    layers = str(read_dspark(open_checkpoint(Path(dspark)), 2, 64).layers)

    def like(present: str | None, kind: str = "", layers: int | None = None, taps: str = "") -> Retraining:
        return Retraining.like(served | {"present": present}, str(tiny_gguf), kind, layers, taps)

    taps = ("--taps", "0,1,2")
    assert like(eagle).flags == ("--kind", "eagle3", *taps)
    assert like(eagle).present == eagle
    assert like(eagle).target == ("--kv-cache-dtype", "int8", "--quantization", "int4")
    assert like(dspark).flags == ("--kind", "dspark", *taps, "--layers", layers)
    assert like(dspark, "eagle3").flags == like(eagle).flags
    assert like(dspark, layers=5).flags == ("--kind", "dspark", *taps, "--layers", "5")
    assert like(eagle, "dspark", 1, "0,1,2").flags == ("--kind", "dspark", *taps, "--layers", "1")
    assert like(None).flags == ("--kind", "eagle3")
    assert like(None, taps="1,2").flags == ("--kind", "eagle3", "--taps", "1,2", "--layout", "speculators")
    assert (like("/no/such/folder").flags, like("/no/such/folder").present) == (("--kind", "eagle3"), None)
    assert "not on this machine" in capsys.readouterr().err
    for present, kind, count, told, problem in (
        (eagle, "", None, "0,2", "must read the same"), (eagle, "", 2, "", "for a DSpark drafter"),
        (None, "", None, "a", "numbers with commas"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=problem):
            like(present, kind, count, told)
