"""The safetensors reader: against the format's own library, and hostile headers."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from slipstream.errors import ModelFileError
from slipstream.program import TENSOR_TYPES
from slipstream.weights import StoredTensor
from slipstream.weights.safetensors import read_safetensors
from tests.weights.fuzzing import fuzz


def folder_with(path: Path, raw: bytes, name: str = "model.safetensors") -> Path:
    (path / "config.json").write_text("{}")
    (path / name).write_bytes(raw)
    return path


def file_of(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(dtype: str = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_equals_the_library(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(2, 4).bfloat16(),
        "c": torch.randn(7).half(),
        "empty": torch.zeros(0, 3),
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"x": 1}')
    checkpoint = read_safetensors(tmp_path)
    assert checkpoint.metadata == {"x": 1}
    for name, tensor in tensors.items():
        assert np.array_equal(checkpoint.tensors[name].float32(), tensor.float().numpy())


def test_several_files(tmp_path: Path) -> None:
    for name, key in (("x.safetensors", "a"), ("y.safetensors", "b")):
        folder_with(tmp_path, file_of({key: entry()}, bytes(16)), name)
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(read_safetensors(tmp_path).tensors) == {"a", "b"}
    index["weight_map"]["c"] = "../elsewhere.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match="plain file name"):
        read_safetensors(tmp_path)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "short": (b"abc", "header length"),
    "header length": ((1 << 63).to_bytes(8, "little") + b"{}", "header length"),
    "not json": (file_of(b"{not json"), "JSON"),
    "not an object": (file_of(b"[1]"), "object"),
    "deep json": (file_of(b"[" * 100_000), "JSON"),
    "not text": (file_of(b"\xff\xfe{}"), "JSON"),
    "NaN": (file_of(b'{"a": NaN}'), "NaN"),
    "entry": (file_of({"a": 3}), "not an object"),
    "dtype": (file_of({"a": entry("F8_E9")}, bytes(16)), "dtype"),
    "shape": (file_of({"a": entry(shape=[-4])}, bytes(16)), "natural"),
    "shape of floats": (file_of({"a": entry(shape=[4.0])}, bytes(16)), "natural"),
    "shape of flags": (file_of({"a": entry(shape=[True])}, bytes(16)), "natural"),
    "shape that overflows": (file_of({"a": entry(shape=[1 << 40, 1 << 40])}, bytes(16)), "does not fill"),
    "offsets": (file_of({"a": entry(offsets=[16, 0])}, bytes(16)), "rising"),
    "past the end": (file_of({"a": entry(offsets=[16, 32])}, bytes(16)), "ends at 32"),
    "overlap": (file_of({"a": entry(), "b": entry(offsets=[8, 24])}, bytes(32)), "overlaps"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_named(name: str, tmp_path: Path) -> None:
    raw, problem = HOSTILE[name]
    folder_with(tmp_path, raw)
    with pytest.raises(ModelFileError, match=problem) as caught:
        read_safetensors(tmp_path)
    assert "model.safetensors" in str(caught.value)


def test_what_was_read_can_be_let_go(tmp_path: Path) -> None:
    """Its memory is the system's again, and it can be read once more; its neighbours' is left alone."""
    numbers = np.arange(8 << 20, dtype=np.float32)
    large, small = numbers.tobytes(), numbers[:999].tobytes()
    ends = len(large), len(large) + len(small)
    header = {"a": entry(shape=[len(numbers)], offsets=[0, ends[0]]), "b": entry(shape=[999], offsets=[*ends])}
    tensors = read_safetensors(folder_with(tmp_path, file_of(header, large + small))).tensors
    assert int(tensors["a"].data.sum()) > 0
    before = resident_bytes()
    for tensor in tensors.values():
        tensor.release()
    assert before - resident_bytes() > 0.9 * len(large)
    assert np.array_equal(tensors["a"].float32(), numbers)
    assert np.array_equal(tensors["b"].float32(), numbers[:999])
    StoredTensor("c", TENSOR_TYPES["F32"], (4,), np.zeros(16, np.uint8)).release()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config.json.*No such file"):
        read_safetensors(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"no \.safetensors"):
        read_safetensors(tmp_path)


def fuzz_folder(folder: Path, cases: int, seed: int) -> dict[str, int]:
    base = file_of({"a": entry(), "b": entry("BF16", (2, 4), (16, 32)), "__metadata__": {"k": "v"}}, bytes(32))
    folder_with(folder, base)
    return fuzz(read_safetensors, folder / "model.safetensors", base, cases, seed, opened=folder)


def test_fuzz(tmp_path: Path) -> None:
    assert min(fuzz_folder(tmp_path, 10_000, seed=3).values()) > 40


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fuzz_long(tmp_path: Path, record_property: Any) -> None:
    record_property("outcomes", fuzz_folder(tmp_path, 1_000_000, seed=4))
