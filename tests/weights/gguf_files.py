"""Small GGUF files, written byte by byte so that they can be wrong in any way."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np


def string(text: str | bytes, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def value(item: Any) -> bytes:
    """Type and value; arrays are lists of strings or of whole numbers."""
    match item:
        case bool():
            return struct.pack("<I?", 7, item)
        case int():
            return struct.pack("<IQ", 10, item)
        case float():
            return struct.pack("<If", 6, item)
        case str():
            return struct.pack("<I", 8) + string(item)
        case list() if item and isinstance(item[0], str):
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(string, item))
        case list():
            return struct.pack("<IIQ", 9, 5, len(item)) + struct.pack(f"<{len(item)}i", *item)
    raise TypeError(item)


def tensor_info(name: str, dims: list[int], code: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, code, offset)


def build(
    metadata: dict[str, Any] | None = None,
    tensors: list[tuple[str, list[int], int, int]] | None = None,
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A file; `tensors` are (name, dims, type code, offset)."""
    metadata, tensors = metadata or {}, tensors or []
    tensor_count, metadata_count = counts or (len(tensors), len(metadata))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, metadata_count)
    head += b"".join(string(key) + value(item) for key, item in metadata.items())
    head += b"".join(tensor_info(*info) for info in tensors)
    return head + b"\0" * (-len(head) % 32) + data


def good(version: int = 3) -> bytes:
    """A valid file with every kind of value and three tensors."""
    metadata = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "flag": True,
        "ratio": 0.5,
        "names": ["a", "bc", "ü"],
        "numbers": [1, -2, 3],
    }
    tensors = [("a", [32, 2], 2, 0), ("b", [4], 0, 64), ("c", [8, 2], 1, 96)]
    data = bytes(36) + bytes(28) + np.arange(4, dtype=np.float32).tobytes() + bytes(16) + bytes(32)
    return build(metadata, tensors, data, version)
