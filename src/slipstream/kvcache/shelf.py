"""Shelf: cached blocks on disk, the prefix cache's second level. They outlive the process, and are checked when read.

A block's file is named by a hash over everything before it: what decides the bits (weights, numerics, format), whose it
is (key and salt), and all tokens up to its last one. It holds its own tokens too, and a hash of its content: what is
damaged, cut off or of another kind is removed and computed again. Files are readable by their owner only; the least
lately used make room. A full disk ends writing, not serving.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipstream.errors import SlipstreamError
from slipstream.program import Namespace

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
MAGIC = b"slipstream block 1\n"
SUFFIX, SCRATCH = ".block", ".scratch"
WRITTEN = 60.0
"""Seconds after which a file that is still scratch is what a killed process left."""
MOST_HEADER = 1 << 16
_DIGEST = 16


class Shelf:
    """A folder of blocks, used from one thread; `block_bytes` of each are the cache's own."""

    def __init__(self, folder: Path, most_bytes: int, block_bytes: int, origin: str):
        """`origin` names the weights. Raises SlipstreamError if the folder cannot be used."""
        self.folder, self.most_bytes, self.block_bytes = folder, most_bytes, block_bytes
        self._origin = origin
        self.stopped: str | None = None
        """Why nothing is written any more, if so."""
        self.damaged = 0
        """Files that were no good."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _sweep(folder)
            files = list(_files(folder, SUFFIX))
        except OSError as error:
            raise SlipstreamError(f"{folder}: cannot keep cached blocks: {error.strerror or error}") from error
        files.sort(key=lambda file: file[0].st_mtime_ns)
        self._sizes: OrderedDict[str, int] = OrderedDict(
            (name.removesuffix(SUFFIX), status.st_size) for status, name in files
        )
        self.bytes = sum(self._sizes.values())

    def __len__(self) -> int:
        return len(self._sizes)

    def root(self, namespace: Namespace, beside: str = "") -> str:
        """The name before the first block. `beside` names what else is kept in the blocks' files."""
        whose = (self._origin, namespace.model, namespace.numerics, str(namespace.kv_format), namespace.adapter)
        rest = [namespace.salt, self.block_bytes, *([beside] if beside else [])]
        return _hash(json.dumps([*whose, *rest]).encode())

    @staticmethod
    def name(before: str, tokens: Sequence[int]) -> str:
        """The name of the block with these tokens after the block, or root, named `before`."""
        return _hash(before.encode() + np.asarray(tokens, "<u4").tobytes())

    def has(self, name: str) -> bool:
        """Whether there is such a block, as far as its name goes."""
        return name in self._sizes

    def read(self, name: str, tokens: Sequence[int], into: Bytes) -> bool:
        """Read a block, if it is whole and holds these tokens."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                head = file.readline(len(MAGIC))
                header = json.loads(file.readline(MOST_HEADER))
                data = file.read(into.size + 1)
            whole = head == MAGIC and len(data) == into.size and header["hash"] == _hash(data)
            if not whole or header["tokens"] != list(tokens):
                raise ValueError("its content is not what it says")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("%s is damaged and is computed again: %s", path, error)
            self.damaged += 1
            self._remove(name)
            return False
        into[:] = np.frombuffer(data, np.uint8)
        self._sizes.move_to_end(name)
        try:
            os.utime(path)
        except OSError:
            log.debug("%s: its time of use is not kept", path)
        return True

    def write(self, name: str, tokens: Sequence[int], data: Bytes) -> bool:
        """Write a block, unless it is there; whether it is now."""
        if name in self._sizes:
            return True
        if self.stopped is not None:
            return False
        content = data.tobytes()
        header = json.dumps({"hash": _hash(content), "tokens": [int(token) for token in tokens]}).encode()
        whole = MAGIC + header + b"\n" + content
        while self.bytes + len(whole) > self.most_bytes and self._sizes:
            self._remove(next(iter(self._sizes)))
        if len(whole) > self.most_bytes:
            return False
        path, scratch = self._path(name), self.folder / f".{name}.{os.getpid()}{SCRATCH}"
        try:
            with open(os.open(scratch, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
                file.write(whole)
            os.replace(scratch, path)
        except OSError as error:
            self.stopped = f"{self.folder}: {error.strerror or error}"
            log.warning("cached blocks are no longer written, serving goes on: %s", self.stopped)
            with contextlib.suppress(OSError):
                scratch.unlink()
            return False
        self._sizes[name] = len(whole)
        self.bytes += len(whole)
        return True

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    def _remove(self, name: str) -> None:
        self.bytes -= self._sizes.pop(name, 0)
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed: %s", self._path(name), error)


def _sweep(folder: Path) -> None:
    """Remove what processes left that were killed while they wrote. Raises OSError."""
    for status, name in _files(folder, SCRATCH):
        if status.st_mtime < time.time() - WRITTEN:
            (folder / name).unlink(missing_ok=True)


def _files(folder: Path, suffix: str) -> Iterator[tuple[os.stat_result, str]]:
    """Those of a kind that are still there when they are looked at: other processes move and remove theirs."""
    for entry in os.scandir(folder):
        if entry.name.endswith(suffix):
            with contextlib.suppress(FileNotFoundError):
                yield entry.stat(), entry.name


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST).hexdigest()
