"""Checkpoints of tiny drafters, made from names alone, so that only what upstream's code answered need be stored."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_CODES = {"F32": "<f4", "I64": "<i8", "BOOL": "|b1"}


def _random(case_name: str, tensor_name: str) -> np.random.Generator:
    """A generator that depends on the two names only."""
    return np.random.default_rng([zlib.crc32(case_name.encode()), zlib.crc32(tensor_name.encode())])


def seed_name(case: Mapping[str, Any]) -> str:
    """The case's name in the seeds: name and salt."""
    return f"{case['name']}#{case['salt']}"


def tensor(case_name: str, tensor_name: str, shape: Sequence[int]) -> np.ndarray:
    """The float32 values of one tensor; case_name is seed_name's."""
    normal = _random(case_name, tensor_name).standard_normal(tuple(shape))
    if tensor_name.endswith(".bias"):
        values = 0.3 * normal
    elif tensor_name.endswith("layer_scalar"):
        values = 1 + 0.15 * normal
    elif len(shape) == 1:
        values = 1 + 0.3 * normal
    elif "embed" in tensor_name or "markov_w1" in tensor_name or "taps" in tensor_name:
        values = normal
    else:
        values = (1.8 if "markov_w2" in tensor_name else 1.3) * normal / np.sqrt(shape[1])
    return values.astype(np.float32)


def tokens(case_name: str, tensor_name: str, shape: Sequence[int], vocab_size: int) -> np.ndarray:
    """The int64 tokens of one input."""
    return _random(case_name, tensor_name).integers(0, vocab_size, tuple(shape))


def draft_vocabulary(case_name: str, vocab_size: int, draft_vocab_size: int) -> np.ndarray:
    """The target's tokens that the drafter's rows stand for, ascending."""
    order = np.argsort(_random(case_name, "draft_vocabulary").standard_normal(vocab_size), kind="stable")
    return np.sort(order[:draft_vocab_size])


def stored(case: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Every tensor of the case's model.safetensors."""
    entries = {name: entry if isinstance(entry, dict) else {"shape": entry} for name, entry in case["tensors"].items()}
    name, values = seed_name(case), {}
    for key, entry in entries.items():
        if key in ("d2t", "t2d"):
            vocab_size, draft_vocab_size = entries["t2d"]["shape"][0], entries["d2t"]["shape"][0]
            kept = draft_vocabulary(name, vocab_size, draft_vocab_size)
            shift = kept - np.arange(draft_vocab_size)
            values[key] = shift if key == "d2t" else np.isin(np.arange(vocab_size), kept)
        else:
            values[key] = tensor(name, key, entry["shape"]) * np.float32(entry.get("scale", 1))
    return values


def inputs(case: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What the drafter is given: taps [rows, taps * width], tokens, and the target's own embedding and head."""
    name, values, weights = seed_name(case), {}, stored(case)
    for key, shape in case["inputs"].items():
        source = f"input.{key}"
        if key.endswith("tokens"):
            values[key] = tokens(name, source, shape, case["facts"]["vocab_size"])
        elif key.endswith("taps"):
            scales = np.asarray(case["facts"]["tap_scales"], np.float32)
            values[key] = tensor(name, source, shape) * np.repeat(scales, shape[1] // len(scales))
        elif key == "target_embed":
            values[key] = weights.get("embed_tokens.weight", tensor(name, source, shape))
        else:
            head = tensor(name, source, shape)
            if "lm_head.weight" in weights:
                kept = np.flatnonzero(weights["t2d"]) if "t2d" in weights else np.arange(len(head))
                head[kept] = weights["lm_head.weight"]
            values[key] = head
    return values


def _write_safetensors(path: Path, values: Mapping[str, np.ndarray]) -> None:
    """Write a .safetensors file: the header's length, the header, the little-endian data."""
    codes = {np.dtype(code): name for name, code in _CODES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, end = [], 0
    for name, value in sorted(values.items(), key=lambda item: (-item[1].itemsize, item[0])):
        kind = codes[value.dtype]
        parts.append(np.ascontiguousarray(value, _CODES[kind]).tobytes())
        start, end = end, end + len(parts[-1])
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def write(case: Mapping[str, Any], folder: Path) -> None:
    """Write the case's config.json and model.safetensors into the folder, making it if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case["config"], indent=2) + "\n")
    _write_safetensors(folder / "model.safetensors", stored(case))
