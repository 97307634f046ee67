"""Recorder: answers go into a traffic file from a thread of its own; serving never waits for it, nor falls with it."""

from __future__ import annotations

import contextlib
import importlib
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slipstream.errors import SlipstreamError, UsageError
from slipstream.training.records import Record
from slipstream.training.store import StoreBusyError, TrafficStore

log = logging.getLogger(__name__)

Redact = Callable[[Record], object]
"""Changes what is kept of a record, or says None: keep nothing. It returns a Record or None."""

MOST_BYTES, MOST_DAYS = 1 << 30, 90.0
MOST_WAITING = 4096
"""Records that wait to be written; more are dropped, and counted."""
BATCH = 256
PATIENCE, CLOSING = 2.0, 10.0
"""Seconds of one try to write to a file that others write to, and of all of them when recording ends; before that it is
tried for ever.
"""
PRUNE_EVERY = 3600.0
"""Seconds without a record after which old ones are looked for."""


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """A checked value of --record: FILE[,asked][,gb=N][,days=N][,redact=MODULE:FUNCTION]."""

    path: Path
    asked: bool = False
    """Whether only requests are recorded whose key or header asks for it."""
    most_bytes: int = MOST_BYTES
    most_days: float = MOST_DAYS
    redact: str = ""

    @classmethod
    def parse(cls, text: str) -> RecordOptions:
        """Raises UsageError for a value that cannot be one."""
        name, *rest = text.split(",")
        if not name:
            raise UsageError("--record takes a file: --record traffic.db[,asked][,gb=1][,days=90][,redact=MODULE:NAME]")
        asked, most_bytes, most_days, redact = False, MOST_BYTES, MOST_DAYS, ""
        for part in rest:
            key, _, value = part.partition("=")
            if key == "asked" and not value:
                asked = True
            elif key == "gb":
                most_bytes = int(1e9 * _number(key, value))
            elif key == "days":
                most_days = _number(key, value)
            elif key == "redact" and ":" in value:
                redact = value
            else:
                raise UsageError(f"--record: {part!r} is none of asked, gb=N, days=N, redact=MODULE:FUNCTION")
        return cls(Path(name), asked, most_bytes, most_days, redact)

    def wants(self, header: str | None, key_says: bool | None) -> bool:
        """Whether a request is recorded: a key can rule it out, otherwise the header decides, the key, the rule here.

        A header that says something else than on means off.
        """
        said = (header or "").strip().lower()
        if key_says is False or said:
            return key_says is not False and said in ("on", "1", "true")
        return not self.asked if key_says is None else key_says


def _number(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise UsageError(f"--record: {key} must be a positive number, not {value!r}")
    return number


def load_redaction(name: str) -> Redact:
    """The function that MODULE:FUNCTION names, installed or in this folder. Raises UsageError."""
    module, _, function = name.partition(":")
    here = str(Path.cwd())
    try:
        if here not in sys.path:
            sys.path.append(here)
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever there is in the operator's module
        raise UsageError(f"--record: redact={name}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise UsageError(f"--record: redact={name} is not a function")
    return found


class Recorder:
    """Takes records at any time from any thread, and writes them in batches."""

    def __init__(self, options: RecordOptions):
        """Raises StoreError if the file cannot be used, UsageError if the redaction cannot be found."""
        self.options = options
        self._redact = load_redaction(options.redact) if options.redact else None
        self._store = TrafficStore(
            options.path, most_bytes=options.most_bytes, most_days=options.most_days, patience=PATIENCE
        )
        self._queue: queue.Queue[Record | None] = queue.Queue(MOST_WAITING)
        self.written, self.dropped = 0, 0
        self.failure: str | None = None
        """Why recording has stopped, if it has."""
        self._end: float | None = None
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def record(self, record: Record) -> None:
        """Keep a record, unless recording has stopped or cannot keep up."""
        if self.failure is not None:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what waits, and end; what cannot be written in time is lost, and nobody waits longer."""
        if self._thread.is_alive():
            self._end = time.monotonic() + CLOSING
            with contextlib.suppress(queue.Full):  # then it does not wait for anything either
                self._queue.put_nowait(None)
            self._thread.join(CLOSING + self._store.patience)

    def _run(self) -> None:
        self._write(self._store.prune)
        while self._end is None or not self._queue.empty():
            try:
                batch = [self._queue.get(timeout=PRUNE_EVERY)]
            except queue.Empty:
                self._write(self._store.prune)
                continue
            while len(batch) < BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            kept = [record for item in batch if item is not None and (record := self._kept(item)) is not None]
            if kept and self._write(partial(self._store.add, kept)):
                self.written += len(kept)
        self._store.close()

    def _write(self, what: Callable[[], None]) -> bool:
        """Do it, as soon as nobody else writes; whether it was done."""
        while self.failure is None:
            try:
                what()
                return True
            except StoreBusyError as error:  # the next try waits as long as this one did
                if self._end is not None and time.monotonic() > self._end:
                    self._stop(str(error))
            except Exception as error:
                self._stop(str(error) if isinstance(error, SlipstreamError) else type(error).__name__)
        return False

    def _kept(self, record: Record) -> Record | None:
        if self._redact is None:
            return record
        try:
            found = self._redact(record)
        except Exception as error:  # whatever it does, nothing unredacted is kept
            self._stop(f"the redaction failed with {type(error).__name__}")
            return None
        if found is None or isinstance(found, Record):
            return found
        self._stop(f"the redaction returned a {type(found).__name__}, not a Record or None")
        return None

    def _stop(self, why: str) -> None:
        if self.failure is None:
            self.failure = why
            log.error("recording has stopped, serving goes on: %s", why)
