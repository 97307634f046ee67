"""Packed weights on disk: the second start maps them instead of packing again.

A file is magic, header length, JSON header, and in its second huge page the matrices' bytes begin. Its key names the
source files (size, time), the packed layout and every matrix; each matrix has a checksum. Anything that does not fit is
packed anew; a disk that is full costs a warning, no more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from slipstream.kernels.native import _native
from slipstream.kernels.native.packing import LAYOUT, Packing
from slipstream.paths import cache_folder

log = logging.getLogger(__name__)

MAGIC = b"SLIPPACK"
ALIGNMENT = 4096
HUGE_PAGE = 2 << 20
MAPPED_WHOLE = 0.75
"""Share of the weights in huge pages that is as good as all of them."""
KEEP = 8
"""Packed models kept; the one used longest ago goes first."""

Bytes = npt.NDArray[np.uint8]


def cache_key(files: Sequence[Path], packings: Sequence[Packing], shard: tuple[int, int]) -> str:
    """Names the content: equal keys mean equal packed bytes."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    parts = [(p.use.name, p.format, p.use.shape, p.through_float) for p in packings]
    return hashlib.sha256(repr((LAYOUT, stats, parts, shard)).encode()).hexdigest()


def layout(packings: Sequence[Packing]) -> tuple[dict[str, int], int]:
    """Offset of each matrix in one buffer, and the buffer's size."""
    offsets, at = {}, 0
    for packing in packings:
        offsets[packing.use.name] = at
        at += -(-packing.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, at


class PackCache:
    """The cache file of one key."""

    def __init__(self, key: str, threads: int):
        self.key, self.threads = key, threads
        self.path = cache_folder() / "packed" / f"{key[:32]}.pack"

    def load(self, size: int, parts: Mapping[str, tuple[int, int]]) -> Bytes | None:
        """The file's matrices [size], verified; `parts` is (offset, bytes) by name. None if there are none to be used.

        They are mapped, so that processes share them, where the system maps files in huge pages; in small ones weights
        are read a tenth slower, step after step, so there they are copied.
        """
        try:
            with self.path.open("rb") as file:
                sums = self._read_header(file, size)
                if sums is None or file.tell() != HUGE_PAGE or os.fstat(file.fileno()).st_size != HUGE_PAGE + size:
                    return None
            mapped = _native.map_file(str(self.path), HUGE_PAGE, size)
        except OSError:
            return None
        if not self._sound(mapped, parts, sums):
            log.warning("packed weights %s are damaged; packing again", self.path)
            return None
        os.utime(self.path)
        huge = _native.mapped_huge(mapped)
        if size < HUGE_PAGE or huge >= MAPPED_WHOLE * size:
            return mapped
        copied = _native.allocate(size)
        copied[:] = mapped
        del mapped
        if huge:
            self._let_go()
        return copied

    def _sound(self, data: Bytes, parts: Mapping[str, tuple[int, int]], sums: Mapping[str, int]) -> bool:
        def same(part: tuple[str, tuple[int, int]]) -> bool:
            name, (offset, nbytes) = part
            return bool(sums.get(name) == _native.checksum(data[offset : offset + nbytes]))

        with ThreadPoolExecutor(self.threads) as threads:
            return all(threads.map(same, parts.items()))

    def _let_go(self) -> None:
        """Let the system forget what it holds of the file, partly in small pages: read anew, they will be huge."""
        with suppress(OSError), self.path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def save(self, data: Bytes, parts: Mapping[str, tuple[int, int]]) -> None:
        """Write the file whole or not at all."""
        sums = {name: _native.checksum(data[at : at + size]) for name, (at, size) in parts.items()}
        header = json.dumps({"key": self.key, "bytes": len(data), "sums": sums}).encode()
        header = header.ljust(HUGE_PAGE - len(MAGIC) - 8)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, suffix=".part", delete=False) as file:
                try:
                    file.write(MAGIC + len(header).to_bytes(8, "little") + header)
                    file.write(data.data)
                    os.replace(file.name, self.path)
                except BaseException:
                    os.unlink(file.name)
                    raise
            self._forget_old()
        except OSError as error:
            log.warning("packed weights are not kept: %s", error)

    def _read_header(self, file: BinaryIO, size: int) -> dict[str, Any] | None:
        if file.read(len(MAGIC)) != MAGIC:
            return None
        length = int.from_bytes(file.read(8), "little")
        if length != HUGE_PAGE - len(MAGIC) - 8:
            return None
        try:
            header = json.loads(file.read(length))
            if header["key"] != self.key or header["bytes"] != size:
                return None
            return dict(header["sums"])
        except (ValueError, KeyError, TypeError):
            return None

    def _forget_old(self) -> None:
        for path in list(self._by_age())[KEEP:]:
            path.unlink(missing_ok=True)

    def _by_age(self) -> Iterator[Path]:
        files = [(path.stat().st_mtime, path) for path in self.path.parent.glob("*.pack")]
        return (path for _, path in sorted(files, reverse=True))
