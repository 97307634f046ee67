"""/admin: who may, what is refused; a drafter that goes to work while answers are made; whoever waits for a request."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from slipstream.serving.activity import Activity
from slipstream.serving.admin import MOST_SECONDS, activity, activity_asked
from slipstream.serving.errors import ApiError
from tests.serving.conftest import KEY, Server, start, stop
from tests.speculation.folders import eagle3_folder

ADMIN, USER = "sk-administrator", KEY


@pytest.fixture(scope="module")
def server(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = {
        "boss": {"sha256": hashlib.sha256(ADMIN.encode()).hexdigest(), "admin": True},
        "user": {"sha256": hashlib.sha256(USER.encode()).hexdigest()},
    }
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    file.write_text(json.dumps(keys))
    running = start(tiny_gguf, "--api-keys-file", str(file), "--kv-cache-gb", "0.05", "--max-model-len", "512")
    yield running
    stop(running)


def admin(server: Server, body: Any = None, key: str = ADMIN) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    with server.client() as client:
        if body is None:
            answer = client.get("/admin/drafter", headers=headers)
        else:
            answer = client.post("/admin/drafter", headers=headers, content=json.dumps(body))
    return answer.status_code, answer.json()


def complete(server: Server, seed: int) -> str:
    body = {"prompt": f"abc {seed}", "max_tokens": 80, "temperature": 0.0, "ignore_eos": True, "seed": seed}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def wait_until_well(server: Server) -> None:
    """And until it was asked what it does."""
    deadline = time.monotonic() + 30
    with server.client() as client:
        while client.get("/health").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    time.sleep(1.5)


def start_again(server: Server) -> None:
    """Kill the engine, and wait for the next one."""
    os.kill(server.engine_pid(), signal.SIGKILL)
    deadline = time.monotonic() + 30
    while admin(server)[1]["rollout"] is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    wait_until_well(server)


def test_who_may(server: Server) -> None:
    assert admin(server, key=USER)[0] == 403
    assert admin(server, key="sk-nobody-at-all")[0] == 401
    status, report = admin(server)
    assert (status, report["rollout"]) == (200, None)


def test_a_web_page_is_not_taken_for_its_user(tiny_gguf: Path) -> None:
    """Without keys whoever is on this machine may: a page in his browser, a proxy, or another name for it may not."""
    running = start(tiny_gguf, "--kv-cache-gb", "0.02", "--max-model-len", "256")
    try:
        with running.client() as client:
            for headers, status in (
                ({}, 200), ({"Origin": "http://evil.example"}, 403), ({"X-Forwarded-For": "1.2.3.4"}, 403),
                ({"Host": "evil.example"}, 403), ({"Host": "localhost:80"}, 200),
            ):  # fmt: skip
                for route in ("drafter", "activity"):
                    assert client.get(f"/admin/{route}", headers=headers).status_code == status, headers
    finally:
        stop(running)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "stage"), ({"stage": "sideways"}, "a stage is"), ({"stage": "all", "share": 0}, "share"),
        ({"stage": "all", "share": 2}, "share"), ({"stage": "back"}, "no drafter was deployed"),
        ({"stage": "all", "drafter": "/no/such/folder"}, "does not exist"), ({"stage": "all", "what": 1}, "what"),
        ({"stage": "back", "drafter": "/x"}, "name no folder"), ([1], "object"),
    ],
)  # fmt: skip
def test_what_is_refused(server: Server, body: Any, problem: str) -> None:
    status, report = admin(server, body)
    assert status == 400
    assert problem.lower() in report["error"]["message"].lower() or problem == report["error"]["param"]


def test_a_drafter_goes_to_work_under_load(server: Server, tmp_path: Path) -> None:
    before = [complete(server, seed) for seed in range(6)]
    folder = eagle3_folder(tmp_path / "drafter")
    said: list[tuple[int, str]] = []
    going = True

    def traffic(first: int) -> None:
        seed = first
        while going:
            said.append((seed % 6, complete(server, seed % 6)))
            seed += 1

    threads = [threading.Thread(target=traffic, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        for body in (
            {"stage": "shadow", "drafter": str(folder), "share": 1.0}, {"stage": "canary", "share": 0.5},
            {"stage": "all"}, {"stage": "back"}, {"stage": "all", "drafter": str(folder)},
        ):  # fmt: skip
            done = len(said) + 12
            status, report = admin(server, body)
            assert status == 200, report
            while len(said) < done:
                assert all(thread.is_alive() for thread in threads)
    finally:
        going = False
        for thread in threads:
            thread.join()
    assert {(seed, text) for seed, text in said} == {(seed, before[seed]) for seed, _ in said}
    status, report = admin(server)
    assert report["rollout"]["candidate"] == str(folder)
    assert report["rollout"]["stage"] == "all"


def test_an_engine_that_is_started_again_has_its_drafter(server: Server, tmp_path: Path) -> None:
    folder = eagle3_folder(tmp_path / "drafter")
    assert admin(server, {"stage": "all", "drafter": str(folder)})[0] == 200
    pid = server.engine_pid()
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while admin(server)[1]["rollout"] is not None and time.monotonic() < deadline:
        time.sleep(0.05)  # until the new engine is asked how it is
    while (rollout := admin(server)[1]["rollout"]) is None or rollout["candidate"] != str(folder):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert rollout["stage"] == "all"
    assert admin(server, {"stage": "back"})[0] == 200


@pytest.mark.parametrize("back", [False, True])
def test_an_engine_that_is_started_again_has_the_proven_drafter_too(back: bool, server: Server, tmp_path: Path) -> None:
    """Beside the candidate, or once that was taken back."""
    proven, candidate = (eagle3_folder(tmp_path / name, salt=salt) for salt, name in enumerate(("proven", "candidate")))
    for stage, folder in (("all", proven), ("shadow", candidate)):
        assert admin(server, {"stage": stage, "drafter": str(folder)})[0] == 200
    if back:
        assert admin(server, {"stage": "back"})[0] == 200
    os.kill(server.engine_pid(), signal.SIGKILL)
    deadline, newest = time.monotonic() + 30, proven if back else candidate
    while admin(server)[1]["rollout"] is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    while (rollout := admin(server)[1]["rollout"]) is None or rollout["candidate"] != str(newest):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert admin(server)[1]["present"] == str(proven)
    assert rollout["stage"] == ("all" if back else "shadow")
    assert admin(server, {"stage": "back"})[0] == 200
    assert complete(server, 1)


def test_an_engine_that_ends_again_and_again_loses_its_drafter(server: Server, tmp_path: Path) -> None:
    folder = eagle3_folder(tmp_path / "drafter")
    assert admin(server, {"stage": "all", "drafter": str(folder)})[0] == 200
    deadline = time.monotonic() + 60
    for _ in range(2):
        while (rollout := admin(server)[1]["rollout"]) is None or rollout["outcome"] is not None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(server.engine_pid(), signal.SIGKILL)
        while admin(server)[1]["rollout"] is not None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    wait_until_well(server)
    assert admin(server)[1]["rollout"] is None
    assert complete(server, 1)


def test_a_drafter_that_was_taken_back_stays_back(server: Server, tmp_path: Path) -> None:
    """Also when the engine is started again."""
    folder = eagle3_folder(tmp_path / "drafter")
    assert admin(server, {"stage": "all", "drafter": str(folder)})[0] == 200
    assert admin(server, {"stage": "back"})[0] == 200
    start_again(server)
    assert complete(server, 1)
    assert admin(server)[1]["rollout"] is None


def test_what_brings_nothing_is_taken_back_by_itself(server: Server, tmp_path: Path) -> None:
    """That is seen in metrics, and stays so when the engine is started again."""

    def stages() -> dict[str, str]:
        with server.client() as client:
            lines = client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("slipstream_rollout_stage{")]
        return {line.split('stage="')[1].split('"')[0]: line.split()[-1] for line in found}

    folder = eagle3_folder(tmp_path / "drafter")
    assert admin(server, {"stage": "shadow", "drafter": str(folder), "share": 1.0})[0] == 200
    assert stages() == {"shadow": "1.0", "canary": "0.0", "all": "0.0", "back": "0.0"}
    for seed in range(200):
        complete(server, seed)
        if (outcome := admin(server)[1]["rollout"]["outcome"]) is not None:
            break
    assert "tau 1.0" in outcome
    assert stages()["back"] == "1.0"
    start_again(server)
    assert admin(server)[1]["rollout"] is None
    assert complete(server, 1)


def test_a_damaged_folder_leaves_the_server_as_it_was(server: Server, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\x10" * 64)
    status, report = admin(server, {"stage": "all", "drafter": str(tmp_path)})
    assert status == 400, report
    assert complete(server, 1)


ENOUGH = 15.0
"""Seconds for what comes at once, and fewer than anybody here waits for what does not come."""


def seen(server: Server, *, key: str = ADMIN, timeout: float = ENOUGH, **query: float) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.get(f"{server.url}/admin/activity", headers=headers, params=query, timeout=timeout)
    return answer.status_code, answer.json()


def begun(server: Server) -> int:
    status, report = seen(server)
    assert (status, report["open"]) == (200, 0)
    return int(report["begun"])


@contextmanager
def unanswered(server: Server) -> Iterator[None]:
    """A request that stays open: its engine is halted."""
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(complete, server, 1)
        try:
            yield
            assert not answered.done()
        finally:
            os.kill(engine, signal.SIGCONT)
        assert answered.result()


def test_who_may_see_activity(server: Server) -> None:
    assert [seen(server, key=key)[0] for key in (ADMIN, USER, "sk-nobody-at-all")] == [200, 403, 401]


def test_activity_is_told_at_once_when_there_is_some(server: Server) -> None:
    before = begun(server)
    with unanswered(server):
        assert seen(server, since=before, wait=30) == (200, {"open": 1, "begun": before + 1})
        assert seen(server, since=before + 1, wait=30) == (200, {"open": 1, "begun": before + 1})
    assert seen(server, since=before, wait=30) == (200, {"open": 0, "begun": before + 1})


def test_activity_is_waited_for(server: Server) -> None:
    """For so long, and no longer than until a request begins, of whatever kind."""
    before, asked = begun(server), time.monotonic()
    assert seen(server, since=before, wait=0.7) == (200, {"open": 0, "begun": before})
    assert time.monotonic() - asked >= 0.7
    for path, body in (
        ("completions", {"prompt": "a", "max_tokens": 2}),
        ("completions", {"prompt": "a", "max_tokens": 0, "echo": True, "logprobs": 1}),
        ("embeddings", {"input": "a"}),
    ):
        for named in (False, True):
            with ThreadPoolExecutor(1) as pool, server.client() as client:
                told = pool.submit(seen, server, wait=30, **({"since": before} if named else {}))  # type: ignore[arg-type]
                time.sleep(0.4)
                assert not told.done()
                assert client.post(f"/v1/{path}", json=body).status_code == 200
                before += 1
                assert told.result()[1]["begun"] == before


def test_who_does_not_wait_for_activity_any_more_is_no_failure(server: Server) -> None:
    def failed() -> list[str]:
        with server.client() as client:
            return [line for line in client.get("/metrics").text.splitlines() if "requests_failed" in line]

    before = failed()
    with pytest.raises(httpx.ReadTimeout):
        seen(server, since=begun(server), wait=30, timeout=0.3)
    assert complete(server, 1)
    assert failed() == before


@pytest.mark.parametrize(
    ("query", "field"),
    [
        *(({"since": value}, "since") for value in ("", "-1", "1.5", "x", "nan", "\u0663", "9" * 5000)),
        *(({"wait": value}, "wait") for value in ("", "-1", "-inf", "nan", "x", "1s")),
    ],
)
def test_what_activity_is_asked_by(query: Mapping[str, str], field: str) -> None:
    with pytest.raises(ApiError) as refused:
        activity_asked(query)
    assert (refused.value.status, refused.value.param) == (400, field)


def test_how_long_activity_is_waited_for() -> None:
    assert activity_asked({}) == (None, 0.0)
    assert activity_asked({"since": "0", "wait": "2.5"}) == (0, 2.5)
    assert [activity_asked({"wait": long})[1] for long in ("31", "inf")] == [MOST_SECONDS] * 2 == [30.0] * 2


def test_whoever_waits_for_activity_leaves_nothing() -> None:
    """He may go away, or be cancelled."""

    async def run() -> None:
        gone, one = asyncio.Event(), Activity()

        async def receive() -> Any:
            await gone.wait()
            return {"type": "http.disconnect"}

        request = Request({"type": "http", "headers": [], "query_string": b"wait=30"}, receive)
        for end in (lambda task: gone.set(), lambda task: task.cancel()):
            gone.clear()
            task = asyncio.create_task(activity(request, one))
            await asyncio.sleep(0.05)
            assert not task.done()
            end(task)
            await asyncio.wait([task], timeout=ENOUGH)
            assert task.done()
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_whoever_waits_for_activity_does_not_keep_the_server(tiny_gguf: Path) -> None:
    running = start(tiny_gguf, "--kv-cache-gb", "0.02", "--max-model-len", "256")
    try:
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(seen, running, since=0, wait=30)
            time.sleep(0.4)
            assert not told.done()
            running.process.send_signal(signal.SIGTERM)
            assert told.result() == (200, {"open": 0, "begun": 0})
        assert running.process.wait(ENOUGH) == 0
    finally:
        stop(running)
