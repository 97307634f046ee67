"""Checksums of files, with one progress over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

Progress = Callable[[str, int, int], None]


class Digest(Protocol):
    """What hashlib makes."""

    def update(self, data: bytes, /) -> None:
        """Take more bytes in."""

    def hexdigest(self) -> str:
        """The sum of all of them."""


class Sums:
    """Sums of some files, one after another."""

    def __init__(self, files: Iterable[Path], progress: Progress | None = None):
        self._progress, self._done = progress, 0
        self._size = sum(file.stat().st_size for file in files if file.exists())

    def of(self, file: Path, digest: Digest) -> str:
        """The file's sum, in hexadecimal."""
        with file.open("rb") as data:
            while block := data.read(1 << 22):
                digest.update(block)
                self._done += len(block)
                if self._progress:
                    self._progress("verifying", self._done, self._size)
        return digest.hexdigest()
