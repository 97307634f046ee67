"""API keys: known by their SHA-256 only, compared in constant time, each with limits of its own.

The file is JSON: {"name": {"sha256": "…", "max_concurrent": 8, "requests_per_minute": 60, "record": true}}; all but
the hash may be left out. "min_priority" is the most urgent that its requests may be (default 0; lower goes first).
`record` says whether the key's requests are recorded where --record is given;
"admin": true lets it deploy drafters. No key may fill the queue: there is room for those that have nothing in it, as
far as half of it goes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.errors import UsageError
from slipstream.serving.errors import ApiError, bad_request

MAX_KEY = 512
MOST_PRIORITY = 100
"""The least urgent that a request can be, and as far below zero where no keys are needed."""


@dataclass
class Key:
    """A tenant: its name, its key's hash, its limits, its requests that run, and the places they hold in the queue."""

    name: str
    sha256: bytes
    max_concurrent: int | None = None
    requests_per_minute: int | None = None
    record: bool | None = None
    min_priority: int = 0
    admin: bool = False
    running: int = 0
    held: int = 0
    recent: deque[float] = field(default_factory=deque)
    all_keys: list[Key] = field(default_factory=list, repr=False)

    def check_priority(self, priority: int) -> None:
        """Raise ApiError 400 for a request that wants to go before those that it may not go before."""
        if not self.min_priority <= priority <= MOST_PRIORITY:
            allowed = f"from {self.min_priority} to {MOST_PRIORITY}"
            raise bad_request(f"priority must be {allowed} here, not {priority}", "priority")

    @property
    def _others(self) -> list[Key]:
        return [key for key in self.all_keys if key is not self]

    def most(self, places: int) -> int:
        """Prompts that one request may bring, however little is going on."""
        return -(-places // 2) if self._others else places

    def room(self, places: int) -> int:
        """Places of the queue that it may hold now: as many as every other busy key, and one that is not yet.

        What is kept for keys that hold nothing it may have too while it holds nothing itself.
        """
        busy = sum(key.held > 0 for key in self._others)
        idle = len(self._others) - busy
        fair = -(-places // (1 + busy + (idle > 0)))
        kept = min(idle, places // 2) if self.held else 0
        return min(fair, places - sum(key.held for key in self._others) - kept)

    @contextmanager
    def admitted(self, prompts: int, places: int) -> Iterator[None]:
        """Count a request while it runs, and its prompts' places in a queue. Raises ApiError if a limit is reached."""
        now = time.monotonic()
        while self.recent and self.recent[0] <= now - 60.0:
            self.recent.popleft()
        if self.requests_per_minute is not None and len(self.recent) >= self.requests_per_minute:
            wait = max(1, round(self.recent[0] + 60.0 - now))
            raise _too_many(f"this key may make {self.requests_per_minute} requests a minute", wait)
        if self.max_concurrent is not None and self.running >= self.max_concurrent:
            raise _too_many(f"this key may have {self.max_concurrent} requests at once", 1)
        if self.held + prompts > (room := self.room(places)):
            raise _too_many(f"this key may have {max(room, 0)} of the queue's {places} places now", 1)
        if self.requests_per_minute is not None:
            self.recent.append(now)
        self.running += 1
        self.held += prompts
        try:
            yield
        finally:
            self.running -= 1
            self.held -= prompts


def _too_many(message: str, wait: int) -> ApiError:
    return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", headers={"Retry-After": str(wait)})


def hashed(key: str) -> bytes:
    """A key's SHA-256."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Keys:
    """All keys; with none, everybody is let in."""

    def __init__(self, keys: list[Key]):
        self._keys = keys
        for key in keys:
            key.all_keys = keys
        self._anonymous = Key("", b"", min_priority=-MOST_PRIORITY)

    @property
    def required(self) -> bool:
        """Whether a key has to be shown."""
        return bool(self._keys)

    def find(self, authorization: str | None) -> Key:
        """The key of an Authorization header. Raises ApiError 401. Every known key is compared, whichever fits."""
        if not self._keys:
            return self._anonymous
        scheme, _, shown = (authorization or "").partition(" ")
        digest = hashed(shown.strip()[:MAX_KEY])
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        if found is None or scheme.lower() != "bearer":
            raise ApiError(
                401, "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY", "authentication_error",
                code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return found


def load_keys(plain: list[str], file: Path | None) -> Keys:
    """Keys from the command line and from a file. Raises UsageError."""
    keys = [Key(f"key-{index}", hashed(key)) for index, key in enumerate(plain, 1) if _usable(key)]
    if file is not None:
        try:
            entries = json.loads(file.read_text(encoding="utf-8"))
            keys += [_entry(name, entry) for name, entry in entries.items()]
        except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
            raise UsageError(f"--api-keys-file {file}: {error}") from error
    if len({key.name for key in keys}) != len(keys):
        raise UsageError("two API keys have the same name")
    return Keys(keys)


def _usable(key: str) -> bool:
    if not 8 <= len(key) <= MAX_KEY:
        raise UsageError(f"an API key must have 8 to {MAX_KEY} characters")
    return True


_OPTIONS = ("max_concurrent", "requests_per_minute", "min_priority", "record", "admin")


def _entry(name: str, entry: dict[str, object]) -> Key:
    digest = bytes.fromhex(str(entry["sha256"]))
    if len(digest) != 32 or not set(entry) <= {"sha256", *_OPTIONS}:
        raise ValueError(f"{name}: takes sha256 (64 hex digits), {', '.join(_OPTIONS)}")
    record, admin = entry.get("record"), entry.get("admin", False)
    if not (record is None or isinstance(record, bool)) or not isinstance(admin, bool):
        raise ValueError(f"{name}: record and admin must be true or false")

    def limit(what: str) -> int | None:
        value = entry.get(what)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return value
        raise ValueError(f"{name}: {what} must be a positive number")

    first = entry.get("min_priority", 0)
    if not isinstance(first, int) or isinstance(first, bool) or not -MOST_PRIORITY <= first <= MOST_PRIORITY:
        raise ValueError(f"{name}: min_priority must be a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}")
    return Key(name, digest, limit("max_concurrent"), limit("requests_per_minute"), record, first, admin)
