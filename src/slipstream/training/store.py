"""TrafficStore: recorded answers in an SQLite file, bounded in size and age. A crash loses at most the last moment."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from slipstream.errors import SlipstreamError
from slipstream.training.records import (
    Record,
    pack_tokens,
    settings_of_json,
    spans_json,
    spans_of,
    unpack_tokens,
)

VERSION = 1
_PRUNED = 0.1
"""Share of the records that goes at once when there are too many."""
_CHECKPOINTS, _PAUSE = 40, 0.25
"""Times that emptying the log of writes is tried when others read the file, and seconds between two."""
_PAGE = 512
"""Records read at a time: the file is not held while they are looked at."""
_SCHEMA = """
CREATE TABLE records (
  id INTEGER PRIMARY KEY, time REAL NOT NULL, request TEXT NOT NULL, key TEXT NOT NULL, tag TEXT NOT NULL,
  target TEXT NOT NULL, template TEXT NOT NULL, settings TEXT NOT NULL, spans TEXT NOT NULL,
  tokens BLOB NOT NULL, steps BLOB NOT NULL, count INTEGER NOT NULL
);
CREATE INDEX by_time ON records (time);
CREATE INDEX by_request ON records (request);
CREATE INDEX by_key ON records (key);
"""
_COLUMNS = "id, time, request, key, tag, target, template, settings, spans, tokens, steps"


class StoreError(SlipstreamError):
    """A traffic file that cannot be opened, read or written."""


class StoreBusyError(StoreError):
    """A traffic file that another process writes to; it will be free again."""


@dataclass(frozen=True, slots=True)
class Which:
    """Which records are meant; None: any. `before` and `since` are seconds since the epoch."""

    request: str | None = None
    key: str | None = None
    tag: str | None = None
    target: str | None = None
    before: float | None = None
    since: float | None = None

    def clause(self) -> tuple[str, list[str | float]]:
        """As SQL, with its values."""
        tests: list[tuple[str, str | float | None]] = [
            ("request = ?", self.request), ("key = ?", self.key), ("tag = ?", self.tag), ("target = ?", self.target),
            ("time < ?", self.before), ("time >= ?", self.since),
        ]  # fmt: skip
        wanted = [(test, value) for test, value in tests if value is not None]
        return " AND ".join(test for test, _ in wanted) or "1", [value for _, value in wanted]


class TrafficStore:
    """Use as a context manager, from one thread. Readers and one writer can have the same file open."""

    def __init__(
        self,
        path: Path,
        *,
        create: bool = True,
        most_bytes: int | None = None,
        most_days: float | None = None,
        patience: float = 10.0,
    ):
        """Raises StoreError. A file that is made here can be read by its owner only.

        With bounds, the oldest records make room when some are added, and on `prune`. Whoever else writes is waited
        for, `patience` seconds at most.
        """
        if not create and not path.is_file():
            raise StoreError(f"{path}: there is no such traffic file; record one with serve --record {path}")
        self.path, self.most_bytes, self.most_days, self.patience = path, most_bytes, most_days, patience
        try:
            if create and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            self._db = sqlite3.connect(path, timeout=patience, isolation_level=None, check_same_thread=False)
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{path}: cannot be used as a traffic file: {error}") from error

    def _open(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version not in (0, VERSION) or (tables and version != VERSION):
            raise StoreError(f"{self.path}: is no traffic file of this version (it says {version})")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA secure_delete = ON")  # what is deleted is not to be found in the file
        if not tables:
            self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._make()

    def _make(self) -> None:
        """All or nothing: a process that is killed here leaves an empty file."""
        self._db.execute("BEGIN IMMEDIATE")
        if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:  # nobody else was faster
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {VERSION}")
        self._db.execute("COMMIT")

    def __enter__(self) -> TrafficStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @property
    def bytes(self) -> int:
        """Size of what the file holds."""
        pages, free, size = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def add(self, records: Sequence[Record]) -> None:
        """Add records in one go; the oldest make room where there are too many. Raises StoreError."""
        rows = [
            (
                r.time or time.time(), r.request, r.key, r.tag, r.target, r.template,
                json.dumps(dict(r.settings)), spans_json(r), pack_tokens(r.tokens), pack_tokens(r.steps), r.answered,
            )
            for r in records
        ]  # fmt: skip
        with self._writing():
            self._db.executemany(
                "INSERT INTO records (time, request, key, tag, target, template, settings, spans, tokens, steps, "
                "count) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                rows,
            )
            self._prune()

    def prune(self) -> None:
        """Delete what is too old or too much by now. Raises StoreError."""
        with self._writing():
            self._prune()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """All that is done within, or nothing. Raises StoreError."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._problem(error) from error

    def _problem(self, error: sqlite3.Error) -> StoreError:
        busy = getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        return (StoreBusyError if busy else StoreError)(f"{self.path}: cannot be written: {error}")

    def _prune(self) -> None:
        if self.most_days is not None:
            self._db.execute("DELETE FROM records WHERE time < ?", (time.time() - 86400.0 * self.most_days,))
        while self.most_bytes is not None and self.bytes > self.most_bytes and (count := len(self)):
            self._db.execute(
                "DELETE FROM records WHERE id IN (SELECT id FROM records ORDER BY time, id LIMIT ?)",
                (max(1, int(_PRUNED * count)),),
            )
            self._db.execute("PRAGMA incremental_vacuum").fetchall()

    def __len__(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM records").fetchone()[0])

    def count(self, which: Which | None = None) -> tuple[int, int]:
        """(records, tokens that the target made)."""
        clause, values = (which or Which()).clause()
        row = self._db.execute(f"SELECT count(*), total(count) FROM records WHERE {clause}", values).fetchone()
        return int(row[0]), int(row[1])

    def tags(self) -> dict[str, tuple[int, int]]:
        """(records, tokens that the target made) by tag."""
        rows = self._db.execute("SELECT tag, count(*), total(count) FROM records GROUP BY tag ORDER BY tag").fetchall()
        return {tag: (int(count), int(tokens)) for tag, count, tokens in rows}

    def records(self, which: Which | None = None, newest: int | None = None) -> Iterator[Record]:
        """In order of time, the `newest` so many. Raises RecordError where one is damaged."""
        clause, values = (which or Which()).clause()
        after: tuple[float, int] = (-1e300, -1)
        if newest is not None:
            query = f"SELECT time, id FROM records WHERE {clause} ORDER BY time DESC, id DESC LIMIT 1 OFFSET ?"
            after = self._db.execute(query, [*values, newest]).fetchone() or after
        query = f"SELECT {_COLUMNS} FROM records WHERE ({clause}) AND (time, id) > (?, ?) ORDER BY time, id LIMIT ?"
        while rows := self._db.execute(query, [*values, *after, _PAGE]).fetchall():
            for row in rows:
                yield _record(row)
            after = (rows[-1][1], rows[-1][0])

    def steps(self, which: Which, newest: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(tag, tokens that each step brought) of the newest so many records, in order of time."""
        clause, values = which.clause()
        query = f"SELECT tag, steps FROM records WHERE {clause} ORDER BY time DESC, id DESC LIMIT ?"
        for tag, steps in reversed(self._db.execute(query, [*values, newest]).fetchall()):
            yield tag, unpack_tokens(steps)

    def has(self, record: Record) -> bool:
        """Whether a record of the same request, target and tokens is there."""
        query = "SELECT count(*) FROM records WHERE request = ? AND target = ? AND tokens = ?"
        values = (record.request, record.target, pack_tokens(record.tokens))
        return bool(self._db.execute(query, values).fetchone()[0])

    def answered(self, request: str, target: str, prompt: Sequence[int]) -> bool:
        """Whether there is an answer of this target to a request with this prompt."""
        query = "SELECT tokens FROM records WHERE request = ? AND target = ?"
        found = self._db.execute(query, (request, target)).fetchall()
        return any(unpack_tokens(tokens)[: len(prompt)] == tuple(prompt) for (tokens,) in found)

    def delete(self, which: Which) -> int:
        """Delete records for good; returns how many. Raises StoreError if others keep their bytes in the file."""
        clause, values = which.clause()
        try:
            count = self._db.execute(f"DELETE FROM records WHERE {clause}", values).rowcount
            self._db.execute("PRAGMA incremental_vacuum").fetchall()
            for _ in range(_CHECKPOINTS):
                if not self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                    return int(count)
                time.sleep(_PAUSE)
        except sqlite3.Error as error:
            raise self._problem(error) from error
        raise StoreBusyError(
            f"{self.path}: {count} records are deleted, but their bytes stay until whoever reads the file is done; "
            "delete once more then"
        )


def _record(row: tuple[int, float, str, str, str, str, str, str, str, bytes, bytes]) -> Record:
    _, when, request, key, tag, target, template, settings, spans, tokens, steps = row
    return Record(
        unpack_tokens(tokens), spans_of(spans), target, template, tag, key, when, request,
        settings_of_json(settings), unpack_tokens(steps),
    )  # fmt: skip
