"""Recording: nothing that goes wrong with it reaches those who are served."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.errors import UsageError
from slipstream.training import recorder as recorder_module
from slipstream.training.recorder import Recorder, RecordOptions
from slipstream.training.records import Record
from slipstream.training.store import TrafficStore, Which
from tests.serving.conftest import KEY, Server, start, stop
from tests.training.test_store import record


def without_the_third(found: Record) -> Record | None:
    """A redaction: one record is not kept, the others lose their key."""
    if found.request == "r3":
        return None
    return Record(found.tokens, found.spans, found.target, found.template, found.tag, "", found.time, found.request)


def broken(found: Record) -> Record | None:
    raise RuntimeError(f"secret {found.tokens}")


def test_options() -> None:
    options = RecordOptions.parse("a/b.db,asked,gb=2,days=7,redact=m:f")
    assert options == RecordOptions(Path("a/b.db"), True, 2_000_000_000, 7.0, "m:f")
    assert [options.wants(header, None) for header in (None, "on", "off")] == [False, True, False]
    assert [options.wants(None, key) for key in (True, False)] == [True, False]
    everything = RecordOptions.parse("b.db")
    assert [everything.wants(header, key) for header, key in ((None, None), ("off", None), (None, False))] == [
        True,
        False,
        False,
    ]
    for bad in ("", ",asked", "b.db,gb=0", "b.db,gb=x", "b.db,what", "b.db,redact=f", "b.db,days=-1"):
        with pytest.raises(UsageError, match="--record"):
            RecordOptions.parse(bad)
    for redact in ("no_such_module:f", "slipstream:nothing", "slipstream:__version__"):
        with pytest.raises(UsageError, match="redact"):
            Recorder(RecordOptions(Path("never.db"), redact=redact))


def test_records_are_redacted_before_they_are_written(tmp_path: Path) -> None:
    recorder = Recorder(RecordOptions(tmp_path / "t.db", redact="tests.training.test_recorder:without_the_third"))
    for number in range(6):
        recorder.record(record(number))
    recorder.close()
    with TrafficStore(tmp_path / "t.db") as store:
        assert [r.request for r in store.records()] == ["r0", "r1", "r2", "r4", "r5"]
        assert {r.key for r in store.records()} == {""}


def test_a_broken_redaction_keeps_nothing_and_says_nothing_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(RecordOptions(tmp_path / "t.db", redact="tests.training.test_recorder:broken"))
    recorder.record(record(1))
    recorder.close()
    assert recorder.failure is not None
    assert "RuntimeError" in recorder.failure
    assert "secret" not in caplog.text
    with TrafficStore(tmp_path / "t.db") as store:
        assert len(store) == 0


@pytest.mark.parametrize("kind", ["yes", "table"])
def test_a_redaction_that_returns_no_record_stops_recording(kind: str, tmp_path: Path) -> None:
    recorder = Recorder(RecordOptions(tmp_path / "t.db", redact=f"tests.training.test_recorder:{kind}"))
    recorder.record(record(1))
    recorder.close()
    assert recorder.failure is not None
    assert "not a Record" in recorder.failure


def yes(found: Record) -> object:
    return True


def table(found: Record) -> object:
    return {"tokens": found.tokens}


def test_another_writer_does_not_end_recording(tmp_path: Path) -> None:
    recorder = Recorder(RecordOptions(tmp_path / "t.db"))
    recorder._store._db.execute("PRAGMA busy_timeout = 20")
    with contextlib.closing(sqlite3.connect(tmp_path / "t.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        recorder.record(record(1))
        time.sleep(0.3)
        assert recorder.failure is None
        other.rollback()
    recorder.close()
    assert (recorder.written, recorder.failure) == (1, None)


def test_what_is_too_old_goes_also_when_nothing_new_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When recording begins, and every so often."""
    monkeypatch.setattr(recorder_module, "PRUNE_EVERY", 0.05)
    path, day = tmp_path / "t.db", 86400.0

    def left(recorder: Recorder, wanted: list[str]) -> bool:
        deadline = time.monotonic() + 10
        with TrafficStore(path) as store:
            while (found := [r.request for r in store.records()]) != wanted and time.monotonic() < deadline:
                time.sleep(0.01)
        return found == wanted

    with TrafficStore(path) as store:
        store.add([record(1, time=time.time() - 8 * day), record(2, time=time.time() - 6.0 * day)])
    recorder = Recorder(RecordOptions(path, most_days=7.0))
    assert left(recorder, ["r2"])
    with contextlib.closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE records SET time = time - 200000")
    assert left(recorder, [])
    recorder.record(record(3))
    assert left(recorder, ["r3"])
    recorder.close()
    assert recorder.failure is None


def test_what_cannot_make_room_is_not_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that comes between: records and the room for them are one step."""
    prune, times = TrafficStore._prune, 0

    def busy(store: TrafficStore) -> None:
        nonlocal times
        times += 1
        if times in (2, 3):  # the first is when recording begins
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error
        prune(store)

    monkeypatch.setattr(TrafficStore, "_prune", busy)
    recorder = Recorder(RecordOptions(tmp_path / "t.db"))
    recorder.record(record(1))
    recorder.close()
    assert times == 4
    with TrafficStore(tmp_path / "t.db") as store:
        assert [r.request for r in store.records()] == ["r1"]
    assert (recorder.written, recorder.failure) == (1, None)


@pytest.mark.parametrize("waiting", [1, 5000])
def test_closing_waits_for_nobody_for_long(waiting: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stops the server does not wait for another one's lock, whether many records wait or one."""
    monkeypatch.setattr(recorder_module, "PATIENCE", 0.1)
    monkeypatch.setattr(recorder_module, "CLOSING", 0.5)
    recorder = Recorder(RecordOptions(tmp_path / "t.db"))
    with contextlib.closing(sqlite3.connect(tmp_path / "t.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        for number in range(waiting):
            recorder.record(record(number))
        closing = threading.Thread(target=recorder.close)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
        other.rollback()
    recorder._thread.join(60)
    assert not recorder._thread.is_alive()
    assert recorder.failure is not None


def test_a_key_can_rule_recording_out() -> None:
    for text in ("b.db", "b.db,asked"):
        options = RecordOptions.parse(text)
        assert not any(options.wants(header, False) for header in (None, "", "on", "1", "off", "whatever"))
        assert [options.wants(header, True) for header in ("no", "never", "on")] == [False, False, True]


def test_a_full_disk_stops_recording_and_nothing_else(tmp_path: Path) -> None:
    recorder = Recorder(RecordOptions(tmp_path / "t.db"))
    recorder._store._db.execute("PRAGMA max_page_count = 40")
    for number in range(2000):
        recorder.record(record(number, tokens=tuple(range(number, number + 300)), spans=((9, 300),)))
    deadline = time.monotonic() + 20
    while recorder.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    recorder.record(record(1))
    recorder.close()
    assert recorder.failure is not None
    assert "full" in recorder.failure


def test_a_recorder_that_cannot_keep_up_drops(tmp_path: Path) -> None:
    recorder = Recorder(RecordOptions(tmp_path / "t.db", redact="tests.training.test_recorder:slow"))
    for number in range(6000):
        recorder.record(record(number))
    assert recorder.dropped > 0
    recorder.close()
    assert recorder.written + recorder.dropped == 6000


def slow(found: Record) -> Record:
    time.sleep(1e-5)
    return found


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traffic") / "t.db"


@pytest.fixture(scope="module")
def server(smollm: Path, traffic: Path) -> Iterator[Server]:
    running = start(
        smollm, "--api-key", KEY, "--kv-cache-gb", "0.1", "--max-model-len", "512", "--record", str(traffic)
    )
    yield running
    stop(running)


def waited(traffic: Path, count: int) -> list[Record]:
    deadline = time.monotonic() + 10
    while True:
        with TrafficStore(traffic) as store:
            records = list(store.records())
        if len(records) >= count or time.monotonic() > deadline:
            return records
        time.sleep(0.05)


@pytest.mark.features("recording", "text drafts")
@pytest.mark.features("recording", "n", "sampling", "streaming")
def test_what_was_served_is_recorded(server: Server, traffic: Path) -> None:
    repeated = "one two three four five six seven eight\n" * 8
    with server.client() as client:
        body = {"prompt": repeated, "max_tokens": 60, "temperature": 0, "seed": 5, "ignore_eos": True}
        tag = {"X-Slipstream-Tag": "tests"}
        first = client.post("/v1/completions", json=body, headers=tag).json()
        client.post("/v1/completions", json=body, headers={"X-Slipstream-Record": "off"})
        chat = {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 9,
            "n": 2,
            "temperature": 0.7,
            "stream": True,
        }
        events = client.post("/v1/chat/completions", json=chat).text
        figures = client.get("/metrics").text
    assert "data: [DONE]" in events
    assert "slipstream_recording" in figures
    records = waited(traffic, 3)
    assert len(records) == 3
    completion = next(r for r in records if r.tag == "tests")
    assert completion.request == first["id"]
    assert completion.answered == first["usage"]["completion_tokens"] == 60
    assert len(completion.prompt) == first["usage"]["prompt_tokens"]
    assert sum(completion.steps) == 60
    assert max(completion.steps) > 1  # drafts were accepted
    assert completion.settings == {"temperature": 0.0, "ignore_eos": 1.0}
    assert completion.key == "key-1"
    assert len(completion.target) == 32
    choices = [r for r in records if r.request != first["id"]]
    assert len({r.prompt for r in choices}) == 1
    assert all(r.settings == {"temperature": 0.7} and 1 <= r.answered <= 9 and r.template for r in choices)
    with TrafficStore(traffic) as store:
        assert store.delete(Which(request=first["id"])) == 1


def test_a_client_that_leaves_is_not_recorded(server: Server, traffic: Path) -> None:
    before = len(waited(traffic, 1))
    body = {"prompt": "go on", "max_tokens": 400, "temperature": 1.0, "stream": True, "ignore_eos": True}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
    time.sleep(0.5)
    assert len(waited(traffic, before)) == before


def test_how_the_target_is_served_is_recorded(tiny_gguf: Path, tmp_path: Path) -> None:
    """In other precision it gives other answers, which teach a drafter for this one the wrong lesson."""
    targets = []
    for flags in ((), ("--kv-cache-dtype", "int8")):
        path = tmp_path / f"{len(targets)}.db"
        running = start(tiny_gguf, "--kv-cache-gb", "0.02", "--max-model-len", "256", "--record", str(path), *flags)
        try:
            with running.client() as client:
                assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4}).status_code == 200
        finally:
            stop(running)
        with TrafficStore(path) as store:
            targets += [found.target for found in store.records()]
    assert targets[1] == f"{targets[0]} --kv-cache-dtype int8"
    assert " " not in targets[0]
