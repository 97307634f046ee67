"""GGUF v2 and v3 over mmap: metadata, tensors, split files; every length is checked before it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from slipstream.errors import ModelFileError
from slipstream.paths import cache_folder
from slipstream.program.formats import TENSOR_TYPES_BY_CODE
from slipstream.weights.store import Bytes, Checkpoint, StoredTensor

log = logging.getLogger(__name__)

MAGIC = b"GGUF"
MAX_KEY = 65_535
MAX_STRING = 1 << 26
MAX_ITEMS = 1 << 24
MAX_TENSORS = 1 << 17
MAX_DIMS = 4
MAX_SPLITS = 1_000

_SCALARS: dict[int, tuple[struct.Struct, str]] = {
    0: (struct.Struct("<B"), "u1"),
    1: (struct.Struct("<b"), "i1"),
    2: (struct.Struct("<H"), "<u2"),
    3: (struct.Struct("<h"), "<i2"),
    4: (struct.Struct("<I"), "<u4"),
    5: (struct.Struct("<i"), "<i4"),
    6: (struct.Struct("<f"), "<f4"),
    7: (struct.Struct("<?"), "?"),
    10: (struct.Struct("<Q"), "<u8"),
    11: (struct.Struct("<q"), "<i8"),
    12: (struct.Struct("<d"), "<f8"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4][0], _SCALARS[10][0]
_SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class Strings(Sequence[str]):
    """An array of strings in a mapped file, decoded when it is first looked at.

    `end` is where the array is known to end (from an earlier look at this very file); without it the
    strings are walked through at once, which is most of the work of opening a file.
    """

    def __init__(self, cursor: _Cursor, count: int, field: str, end: int | None):
        self._cursor, self._count, self._field = cursor, count, field
        self.start = cursor.at
        self._items: list[str] | None = None
        if end is None or not self.start <= end <= len(cursor.view):
            self._items = cursor.strings(count, field)
        else:
            cursor.at = end
        self.end = cursor.at

    def _all(self) -> list[str]:
        if self._items is None:
            self._cursor.at = self.start
            self._items = self._cursor.strings(self._count, self._field)
            if self._cursor.at != self.end:
                raise self._cursor.fail(self._field, "does not end where it did; delete the cache and try again")
        return self._items

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._all()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, list | Strings) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


class _Cursor:
    """Reads a mapped file front to back and refuses to leave it."""

    def __init__(self, path: Path, data: Bytes, ends: Mapping[int, int]):
        self.path, self.data, self.at, self.ends = path, data, 0, ends
        self.arrays: list[Strings] = []
        self.view = data.data

    def fail(self, field: str, problem: str) -> ModelFileError:
        return ModelFileError(self.path, field, problem)

    def need(self, size: int, field: str) -> int:
        """Offset of the next `size` bytes, after which the cursor stands."""
        start, end = self.at, self.at + size
        if end > len(self.view):
            left = len(self.view) - start
            raise self.fail(field, f"needs {size} bytes at offset {start}, the file has {left} more")
        self.at = end
        return start

    def number(self, kind: struct.Struct, field: str) -> Any:
        return kind.unpack_from(self.view, self.need(kind.size, field))[0]

    def string(self, field: str, limit: int = MAX_STRING) -> str:
        length = self.number(_U64, field)
        if length > limit:
            raise self.fail(field, f"a string of {length} bytes is longer than the limit of {limit}")
        start = self.need(length, field)
        return str(self.view[start : start + length], "utf-8", "replace")

    def strings(self, count: int, field: str) -> list[str]:
        """The body of an array of strings; the hot loop of opening a file."""
        view, at, size = self.view, self.at, len(self.view)
        unpack, result = _U64.unpack_from, []
        for _ in range(count):
            if at + 8 > size:
                break
            length = unpack(view, at)[0]
            at += 8
            if length > MAX_STRING or at + length > size:
                break
            result.append(str(view[at : at + length], "utf-8", "surrogateescape"))
            at += length
        if len(result) < count:
            raise self.fail(field, f"string {len(result)} of {count} does not fit into the file")
        self.at = at
        return result

    def value(self, kind: int, field: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind][0], field)
        if kind == _STRING:
            return self.string(field)
        if kind != _ARRAY:
            raise self.fail(field, f"unknown value type {kind}")
        if depth == 2:
            raise self.fail(field, "arrays are nested more than two deep")
        item, count = self.number(_U32, field), self.number(_U64, field)
        if count > MAX_ITEMS:
            raise self.fail(field, f"an array of {count} items is longer than {MAX_ITEMS}")
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item][1])
            start = self.need(count * dtype.itemsize, field)
            raw = self.data[start : self.at]
            return (raw != 0) if dtype == np.bool_ else raw.view(dtype)
        if item == _STRING:
            array = Strings(self, count, field, self.ends.get(self.at))
            self.arrays.append(array)
            return array
        if count * 12 > len(self.view) - self.at:
            raise self.fail(field, f"an array of {count} arrays does not fit into the file")
        return [self.value(item, field, depth + 1) for _ in range(count)]


def map_file(path: Path) -> Bytes:
    """The file's bytes, mapped read-only. Raises ModelFileError if it cannot be opened."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise ModelFileError(path, "size", "the file is empty")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(path, "file", error.strerror or str(error)) from error
    return np.frombuffer(mapped, np.uint8)


class _KnownEnds:
    """Where the long arrays of strings in a file end, remembered between starts."""

    LEAST = 10_000

    def __init__(self, path: Path):
        stat = path.stat()
        name = hashlib.sha256(repr((path.name, stat.st_size, stat.st_mtime_ns)).encode()).hexdigest()
        self._file = cache_folder() / "gguf" / f"{name[:32]}.json"
        self.ends: dict[int, int] = {}
        try:
            stored = json.loads(self._file.read_text())
            self.ends = {int(start): int(end) for start, end in stored.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            pass

    def keep(self, arrays: list[Strings]) -> None:
        """Remember the long ones, if they are news."""
        ends = {array.start: array.end for array in arrays if len(array) >= self.LEAST}
        if ends == self.ends or not ends:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._file.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(ends))
            temporary.replace(self._file)
        except OSError as error:
            log.warning("the places of strings are not kept: %s", error)


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = cursor.string(f"metadata key {index}", MAX_KEY)
        field = f"metadata {key[:80]!r}"
        if key in metadata:
            raise cursor.fail(field, "appears twice")
        metadata[key] = cursor.value(cursor.number(_U32, field), field)
    return metadata


def _read_tensor_infos(cursor: _Cursor, count: int) -> list[tuple[str, tuple[int, ...], int, int]]:
    infos, seen = [], set()
    for index in range(count):
        name = cursor.string(f"tensor name {index}", MAX_KEY)
        field = f"tensor {name[:80]!r}"
        if name in seen:
            raise cursor.fail(field, "appears twice")
        seen.add(name)
        dims = cursor.number(_U32, field)
        if not 1 <= dims <= MAX_DIMS:
            raise cursor.fail(field, f"has {dims} dimensions, expected 1 to {MAX_DIMS}")
        shape = tuple(cursor.number(_U64, field) for _ in range(dims))
        infos.append((name, shape, cursor.number(_U32, field), cursor.number(_U64, field)))
    return infos


def _place_tensors(
    cursor: _Cursor, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: int
) -> dict[str, StoredTensor]:
    start = -(-cursor.at // alignment) * alignment
    available = len(cursor.view) - start
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, dims, code, offset in infos:
        field = f"tensor {name[:80]!r}"
        kind = TENSOR_TYPES_BY_CODE.get(code)
        if kind is None:
            raise cursor.fail(field, f"tensor type {code} is not supported")
        numbers = 1
        for dim in dims:
            if dim == 0:
                raise cursor.fail(field, "has a dimension of 0")
            numbers *= dim
        if dims[0] % kind.block:
            raise cursor.fail(field, f"rows of {dims[0]} do not fill {kind.name} blocks of {kind.block}")
        if offset % alignment:
            raise cursor.fail(field, f"offset {offset} is not a multiple of {alignment}")
        size = kind.nbytes(numbers)
        if offset + size > available:
            raise cursor.fail(field, f"needs {size} bytes at data offset {offset}, the file has {max(available, 0)}")
        spans.append((offset, offset + size, name))
        data = cursor.data[start + offset : start + offset + size]
        tensors[name] = StoredTensor(name, kind, dims[::-1], data)
    spans.sort()
    for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
        if begin < end:
            raise cursor.fail(f"tensor {second[:80]!r}", f"overlaps tensor {first[:80]!r}")
    return tensors


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]]]:
    magic = bytes(cursor.view[cursor.need(4, "magic") : 4])
    if magic != MAGIC:
        raise cursor.fail("magic", f"{magic!r} is not a GGUF file's {MAGIC!r}")
    version = cursor.number(_U32, "version")
    if version not in (2, 3):
        hint = " (a big-endian file?)" if version in (0x02000000, 0x03000000) else ""
        raise cursor.fail("version", f"{version} is not supported, only 2 and 3 are{hint}")
    tensor_count = cursor.number(_U64, "tensor count")
    metadata_count = cursor.number(_U64, "metadata count")
    for name, count, least in (("tensor", tensor_count, 32), ("metadata", metadata_count, 13)):
        if count > MAX_TENSORS or count * least > len(cursor.view):
            raise cursor.fail(f"{name} count", f"{count} do not fit into the file")
    metadata = _read_metadata(cursor, metadata_count)
    return metadata, _read_tensor_infos(cursor, tensor_count)


def _read_one(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    data = map_file(path)
    known = _KnownEnds(path)
    cursor = _Cursor(path, data, known.ends)
    metadata, infos = _read_header(cursor)
    alignment = metadata.get("general.alignment", 32)
    valid = isinstance(alignment, int) and 8 <= alignment <= 1 << 16
    if not valid or alignment & (alignment - 1):
        raise cursor.fail("general.alignment", f"{alignment!r} is not a power of two from 8 to 65536")
    tensors = _place_tensors(cursor, infos, alignment)
    known.keep(cursor.arrays)
    return metadata, tensors


class TensorHeader(NamedTuple):
    """What a file's header says of a tensor: row-major shape and type code; its data may be missing."""

    name: str
    shape: tuple[int, ...]
    code: int


def read_gguf_header(path: Path) -> tuple[Mapping[str, Any], list[TensorHeader]]:
    """Metadata and tensors of one file of which only the header needs to be there. Raises ModelFileError."""
    metadata, infos = _read_header(_Cursor(path, map_file(path), {}))
    return metadata, [TensorHeader(name, dims[::-1], code) for name, dims, code, _ in infos]


def split_files(path: Path, metadata: dict[str, Any]) -> tuple[Path, ...]:
    """All files of a split model, given its first; just `path` if it is not split."""
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or not 0 <= count <= MAX_SPLITS:
        raise ModelFileError(path, "split.count", f"{count!r} is not a number up to {MAX_SPLITS}")
    if count <= 1:
        return (path,)
    match = _SPLIT_NAME.search(path.name)
    if match is None or int(match[2]) != count:
        raise ModelFileError(path, "split.count", f"a file of {count} parts must be named …-00001-of-{count:05}.gguf")
    if metadata.get("split.no", 0) != 0:
        first = f"{path.name[: match.start()]}-00001-of-{count:05}.gguf"
        raise ModelFileError(path, "split.no", f"this is not the first part; open {first}")
    stem = path.name[: match.start()]
    return tuple(path.with_name(f"{stem}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1))


def read_gguf(path: Path) -> Checkpoint:
    """Open a GGUF model, all parts of it. Raises ModelFileError with the file's name and the field."""
    metadata, tensors = _read_one(path)
    files = split_files(path, metadata)
    for part in files[1:]:
        for name, tensor in _read_one(part)[1].items():
            if name in tensors:
                raise ModelFileError(part, f"tensor {name[:80]!r}", "is also in an earlier part")
            tensors[name] = tensor
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelFileError(path, "split.tensors.count", f"{expected}, but {len(tensors)} were found")
    return Checkpoint("gguf", files, metadata, tensors)


def string_array(metadata: Mapping[str, Any], key: str) -> Sequence[str]:
    """A metadata array of strings, or ()."""
    value = metadata.get(key)
    return value if isinstance(value, Strings) else ()


def number_array(metadata: Mapping[str, Any], key: str) -> npt.NDArray[Any] | None:
    """A metadata array of numbers, or None."""
    value = metadata.get(key)
    return value if isinstance(value, np.ndarray) else None
