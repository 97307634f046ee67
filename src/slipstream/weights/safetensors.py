"""safetensors over mmap, one file or several: the header is checked before any of it is used.

The format's own library has no zero-copy view of bfloat16 for numpy, which the packer needs.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from slipstream.errors import ModelFileError
from slipstream.program import TENSOR_TYPES, TensorType
from slipstream.weights.gguf import map_file
from slipstream.weights.store import Checkpoint, StoredTensor

MAX_HEADER = 1 << 24
MAX_JSON = 1 << 24
MAX_INDEX = 1 << 25
"""Bytes of JSON, which as objects takes up to thirty times the memory; the largest models need half of it."""
MAX_FILES = 1_000
_TABLES = {"I64": TensorType("I64", 27, 1, 8), "BOOL": TensorType("BOOL", -1, 1, 1)}
"""Types of tables (of tokens, say) beside the weights; no weight can be one."""


def load_json(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """A JSON object from a file of at most `limit` bytes. Raises ModelFileError."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ModelFileError(path, "file", error.strerror or str(error)) from error
    if len(data) > limit:
        raise ModelFileError(path, "size", f"is more than {limit >> 20} MB")
    return _object(path, data, "json")


def _object(
    path: Path, data: bytes, field: str, pairs: Callable[[list[tuple[str, Any]]], Any] = dict
) -> dict[str, Any]:
    try:
        value = json.loads(data, parse_constant=_no_constant, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, field, f"is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelFileError(path, field, "is not a JSON object")
    return value


def _no_constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is not a number")
    return float(name)


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the header: a name that appears twice would hide a tensor."""
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ModelFileError(path, "header", f"{twice[:80]!r} appears twice")
    return result


def _natural(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )


def _read_one(path: Path) -> dict[str, StoredTensor]:
    data = map_file(path)
    if len(data) < 8:
        raise ModelFileError(path, "header length", "the file is shorter than 8 bytes")
    length = int.from_bytes(bytes(data[:8]), "little")
    if length > len(data) - 8:
        raise ModelFileError(path, "header length", f"{length} bytes do not fit into the file")
    if length > MAX_HEADER:
        raise ModelFileError(path, "header length", f"is more than {MAX_HEADER >> 20} MB")
    header = _object(path, bytes(data[8 : 8 + length]), "header", partial(_unique, path))
    body = data[8 + length :]
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        field = f"tensor {name[:80]!r}"
        if not isinstance(entry, dict):
            raise ModelFileError(path, field, "its entry is not an object")
        kind = TENSOR_TYPES.get(str(entry.get("dtype"))) or _TABLES.get(str(entry.get("dtype")))
        if kind is None or kind.block != 1:
            raise ModelFileError(path, field, f"dtype {str(entry.get('dtype'))[:40]!r} is not supported")
        shape, offsets = entry.get("shape"), entry.get("data_offsets")
        if not _natural(shape) or len(shape) > 8:
            raise ModelFileError(path, field, "shape is not a list of up to 8 natural numbers")
        if not _natural(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise ModelFileError(path, field, "data_offsets is not a pair of rising numbers")
        numbers = 1
        for dim in shape:
            numbers *= dim
        begin, end = offsets
        if end - begin != kind.nbytes(numbers):
            raise ModelFileError(path, field, f"shape {shape} does not fill {end - begin} bytes")
        if end > len(body):
            raise ModelFileError(path, field, f"ends at {end}, the file has {len(body)} bytes of data")
        spans.append((begin, end, name))
        tensors[name] = StoredTensor(name, kind, tuple(shape), body[begin:end])
    spans.sort()
    for (_, stop, first), (begin, _, second) in itertools.pairwise(spans):
        if begin < stop:
            raise ModelFileError(path, f"tensor {second[:80]!r}", f"overlaps tensor {first[:80]!r}")
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelFileError(folder, "weights", "there is no .safetensors file in this folder")
        return files
    weight_map = load_json(index, MAX_INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelFileError(index, "weight_map", "is not an object")
    names = sorted({str(value) for value in weight_map.values()})
    if len(names) > MAX_FILES:
        raise ModelFileError(index, "weight_map", f"names {len(names)} files, more than {MAX_FILES}")
    for name in names:
        if Path(name).name != name:
            raise ModelFileError(index, "weight_map", f"{name[:80]!r} is not a plain file name")
    return [folder / name for name in names]


def read_safetensors(folder: Path) -> Checkpoint:
    """Open a folder with config.json and safetensors. Raises ModelFileError."""
    metadata = load_json(folder / "config.json")
    files = _weight_files(folder)
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        for name, tensor in _read_one(path).items():
            if name in tensors:
                raise ModelFileError(path, f"tensor {name[:80]!r}", "is also in another file")
            tensors[name] = tensor
    return Checkpoint("safetensors", tuple(files), metadata, tensors)
