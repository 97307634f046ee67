"""The traffic file: what goes in comes out, it stays within its bounds, and damage is a clear error."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.training.records import Record, RecordError, pack_tokens, spans_of, unpack_tokens
from slipstream.training.store import StoreBusyError, StoreError, TrafficStore, Which

BASE = time.time() - 5000


def record(number: int, **fields: object) -> Record:
    values: dict[str, object] = {
        "tokens": (1, 2, 3, number, 5), "spans": ((3, 5),), "target": "t", "template": "m", "tag": f"tag{number % 2}",
        "key": f"key{number % 3}", "time": BASE + number, "request": f"r{number}",
        "settings": {"temperature": 0.5}, "steps": (1, 1),
    }  # fmt: skip
    return Record(**(values | fields))  # type: ignore[arg-type]


def test_what_goes_in_comes_out_in_order_of_time(tmp_path: Path) -> None:
    records = [record(n) for n in range(1500)]
    with TrafficStore(tmp_path / "t.db") as store:
        store.add(records[700:])
        store.add(records[:700])
        assert list(store.records()) == records
        assert list(store.records(Which(tag="tag1", key="key0"))) == [
            r for r in records if (r.tag, r.key) == ("tag1", "key0")
        ]
        assert store.count(Which(since=records[1400].time)) == (100, 200)
        assert store.tags() == {"tag0": (750, 1500), "tag1": (750, 1500)}
    assert (tmp_path / "t.db").stat().st_mode & 0o077 == 0


def test_deleting_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "t.db"
    with TrafficStore(file) as store:
        store.add([record(n, request=f"wanted-{n}", key="somebody-with-a-name") for n in range(50)])
        store.add([record(n) for n in range(50)])
        assert store.delete(Which(request="wanted-7")) == 1
        assert store.delete(Which(key="somebody-with-a-name")) == 49
        assert store.delete(Which(before=BASE + 10)) == 10
        assert len(store) == 40
    left = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"somebody-with-a-name" not in left
    assert b"key1" in left


def test_size_and_age_are_bounded(tmp_path: Path) -> None:
    with TrafficStore(tmp_path / "t.db", most_bytes=400_000) as store:
        for start in range(0, 4000, 100):
            store.add(
                [record(n, tokens=tuple(range(n, n + 200)), spans=((9, 200),)) for n in range(start, start + 100)]
            )
            assert store.bytes <= 400_000
        kept = [int(r.request[1:]) for r in store.records()]
        assert kept == list(range(4000 - len(kept), 4000))
        assert len(kept) > 300
    with TrafficStore(tmp_path / "t.db", most_days=1 / 24) as store:
        store.add([record(1, time=time.time() - 7200), record(2, time=time.time())])
        assert all(r.time > time.time() - 3700 for r in store.records())


def test_without_bounds_nothing_goes(tmp_path: Path) -> None:
    """An import of old answers, into a file that a server keeps larger, deletes none."""
    with TrafficStore(tmp_path / "t.db") as store:
        store.add([record(n, time=1000.0 + n) for n in range(50)])
        assert len(store) == 50


def test_the_newest(tmp_path: Path) -> None:
    records = [record(n) for n in range(40)]
    with TrafficStore(tmp_path / "t.db") as store:
        store.add(records)
        assert list(store.records(newest=7)) == records[-7:]
        assert list(store.records(newest=70)) == records
        assert list(store.records(Which(tag="tag1"), newest=3)) == [r for r in records if r.tag == "tag1"][-3:]
        assert list(store.steps(Which(), 3)) == [(r.tag, r.steps) for r in records[-3:]]
        assert store.has(records[3])
        assert not store.has(record(3, tokens=(1, 2, 3, 9, 9)))
        assert store.answered("r3", "t", (1, 2, 3))
        assert not store.answered("r3", "t", (1, 2, 4))


def test_a_file_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    """Opening writes nothing, so a full disk is no reason not to look."""
    with TrafficStore(tmp_path / "t.db") as store:
        store.add([record(1)])
    with TrafficStore(tmp_path / "t.db", create=False) as store:
        store._db.execute("PRAGMA query_only = ON")
        store._open()
        assert len(store) == 1


def test_another_writer_is_waited_for(tmp_path: Path) -> None:
    with TrafficStore(tmp_path / "t.db") as store, contextlib.closing(sqlite3.connect(tmp_path / "t.db")) as other:
        store._db.execute("PRAGMA busy_timeout = 50")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusyError):
            store.add([record(1)])
        other.rollback()
        store.add([record(1)])
        assert len(store) == 1


def test_a_killed_writer_loses_at_most_the_last_batch(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom slipstream.training.store import TrafficStore\n"
        "from tests.training.test_store import record\n"
        f"store = TrafficStore(Path({str(tmp_path / 't.db')!r}))\n"
        "for n in range(10 ** 6):\n    store.add([record(n)])\n    print(n, flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) >= 40:
            break
    os.kill(writer.pid, signal.SIGKILL)
    said = [int(line) for line in writer.stdout.read().split()]
    writer.wait()
    with TrafficStore(tmp_path / "t.db") as store:
        assert len(store) >= 1 + max(said, default=40)
        assert [r.request for r in store.records()] == [f"r{n}" for n in range(len(store))]


def test_readers_and_a_writer_at_once(tmp_path: Path) -> None:
    with TrafficStore(tmp_path / "t.db") as writer, TrafficStore(tmp_path / "t.db", create=False) as reader:
        writer.add([record(n) for n in range(600)])
        seen = []
        for number, found in enumerate(reader.records()):
            seen.append(found.request)
            if number == 10:
                writer.add([record(600)])
        assert seen == [f"r{n}" for n in range(601)]


def test_damage_is_a_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "t.db"
    with pytest.raises(StoreError, match="no such traffic file"):
        TrafficStore(file, create=False)
    file.write_bytes(b"not a database, whatever its name says" * 100)
    with pytest.raises(StoreError, match="cannot be used"):
        TrafficStore(file)
    file.unlink()
    other = sqlite3.connect(file)
    other.execute("CREATE TABLE records (a)")
    other.commit()
    other.close()
    with pytest.raises(StoreError, match="no traffic file"):
        TrafficStore(file)
    file.unlink()
    for column, value in (("tokens", b"\x00" * 9), ("spans", "[[5, 2]]"), ("spans", "{"), ("settings", "[1]")):
        with TrafficStore(file) as store:
            store.add([record(1)])
            store._db.execute(f"UPDATE records SET {column} = ?", (value,))
            with pytest.raises(RecordError):
                list(store.records())
            store.delete(Which())


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_tokens_are_packed_and_damage_is_seen(tokens: list[int], damage: bytes) -> None:
    packed = pack_tokens(tokens)
    assert unpack_tokens(packed) == tuple(tokens)
    for bad in (damage, packed[:-1], packed[: len(packed) // 2] + damage):
        try:
            assert len(unpack_tokens(bad)) >= 0
        except RecordError:
            continue


@given(st.text(max_size=30))
def test_spans_are_checked(text: str) -> None:
    with contextlib.suppress(RecordError):
        assert all(len(span) == 2 for span in spans_of(text))


def test_a_bomb_is_not_unpacked() -> None:
    import zlib

    with pytest.raises(RecordError, match="too many"):
        unpack_tokens(zlib.compress(bytes(64 << 20)))
