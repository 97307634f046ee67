"""The GGUF reader: what it reads, and that hostile files end in one clear error."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from slipstream.errors import ModelFileError
from slipstream.weights.gguf import read_gguf
from tests.weights.fuzzing import fuzz
from tests.weights.gguf_files import build, good, string, value


def write(folder: Path, raw: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(raw)
    return path


def test_reads_what_was_written(tmp_path: Path) -> None:
    checkpoint = read_gguf(write(tmp_path, good()))
    assert checkpoint.metadata["names"] == ["a", "bc", "ü"]
    assert checkpoint.metadata["numbers"].tolist() == [1, -2, 3]
    assert checkpoint.metadata["flag"] is True
    assert {name: (t.type.name, t.shape) for name, t in checkpoint.tensors.items()} == {
        "a": ("Q4_0", (2, 32)),
        "b": ("F32", (4,)),
        "c": ("F16", (2, 8)),
    }
    assert checkpoint.tensors["b"].float32().tolist() == [0, 1, 2, 3]
    assert checkpoint.nbytes == 36 + 16 + 32


def test_version_2_differs_in_its_number_only(tmp_path: Path) -> None:
    second, third = (read_gguf(write(tmp_path, good(version), f"{version}.gguf")) for version in (2, 3))
    assert second.files[0].read_bytes()[4:8] == b"\2\0\0\0"
    assert second.metadata.keys() == third.metadata.keys()
    for key, item in third.metadata.items():
        assert np.array_equal(second.metadata[key], item)
    assert second.tensors.keys() == third.tensors.keys()
    for name, tensor in third.tensors.items():
        assert (second.tensors[name].type, second.tensors[name].shape) == (tensor.type, tensor.shape)
        assert np.array_equal(second.tensors[name].data, tensor.data)


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("tokens", ["x", "y"])
    writer.add_float64("f", 1.5)
    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("w", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = read_gguf(path)
    assert checkpoint.metadata["llama.block_count"] == 2
    assert checkpoint.metadata["tokens"] == ["x", "y"]
    assert np.abs(checkpoint.tensors["w"].float32() - values).max() < 0.03


def test_split_files(tmp_path: Path) -> None:
    for part, name in enumerate(("a", "b"), 1):
        metadata = {"split.count": 2, "split.no": part - 1, "split.tensors.count": 2}
        raw = build(metadata, [(name, [4], 0, 0)], bytes(16))
        write(tmp_path, raw, f"m-{part:05}-of-00002.gguf")
    checkpoint = read_gguf(tmp_path / "m-00001-of-00002.gguf")
    assert set(checkpoint.tensors) == {"a", "b"}
    assert len(checkpoint.files) == 2
    with pytest.raises(ModelFileError, match="not the first part"):
        read_gguf(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelFileError, match=r"00002-of-00002.*No such file"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")


HUGE = (1 << 64) - 1
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "not gguf": (b"GGML" + bytes(40), "magic"),
    "truncated header": (b"GGUF\3\0\0\0", "tensor count"),
    "version": (build(version=1), "version"),
    "big endian": (build(version=0x03000000), "big-endian"),
    "tensor count": (build(counts=(HUGE, 0)), "tensor count"),
    "metadata count": (build(counts=(0, HUGE)), "metadata count"),
    "counts past the file": (build(counts=(0, 5000)), "do not fit"),
    "key length": (build(counts=(0, 1))[:24] + struct.pack("<Q", HUGE), "longer than the limit"),
    "string length": (build({"k": "v"}).replace(string("v"), string("v", HUGE)), "'k'"),
    "string past the end": (build({"k": "v"}).replace(string("v"), string("v", 1000)), "needs 1000 bytes"),
    "array length": (build({"k": [1, 2]}).replace(struct.pack("<IQ", 5, 2), struct.pack("<IQ", 5, HUGE)), "'k'"),
    "array of strings": (
        build({"k": ["a"]}).replace(struct.pack("<IQ", 8, 1), struct.pack("<IQ", 8, 1 << 20)),
        "'k'",
    ),
    "nested arrays": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<I", 9)
        + struct.pack("<IQ", 9, 1) * 50 + bytes(64),
        "nested",
    ),
    "value type": (build({"k": 1}).replace(value(1)[:4], struct.pack("<I", 99), 1), "unknown value type"),
    "twice the same key": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (string("k") + value(1)) * 2,
        "appears twice",
    ),
    "alignment": (build({"general.alignment": 12}), "general.alignment"),
    "alignment zero": (build({"general.alignment": 0}), "general.alignment"),
    "no dimensions": (build({}, [("t", [], 0, 0)], bytes(64)), "dimensions"),
    "many dimensions": (build({}, [("t", [1] * 9, 0, 0)], bytes(64)), "dimensions"),
    "dimension 0": (build({}, [("t", [0], 0, 0)], bytes(64)), "dimension of 0"),
    "dimensions that overflow": (build({}, [("t", [1 << 32, 1 << 32], 0, 0)], bytes(64)), "needs"),
    "tensor type": (build({}, [("t", [32], 77, 0)], bytes(64)), "type 77"),
    "part of a block": (build({}, [("t", [33], 2, 0)], bytes(64)), "do not fill"),
    "offset past the file": (build({}, [("t", [4], 0, 1 << 40)], bytes(64)), "needs 16 bytes"),
    "offset that overflows": (build({}, [("t", [4], 0, HUGE - 31)], bytes(64)), "needs 16 bytes"),
    "odd offset": (build({}, [("t", [4], 0, 3)], bytes(64)), "multiple"),
    "overlap": (build({}, [("t", [16], 0, 0), ("u", [4], 0, 32)], bytes(64)), "overlaps"),
    "twice the same tensor": (build({}, [("t", [4], 0, 0), ("t", [4], 0, 32)], bytes(64)), "appears twice"),
    "split without names": (build({"split.count": 3}), "split.count"),
    "split count": (build({"split.count": 1 << 40}), "split.count"),
    "split tensors": (build({"split.tensors.count": 9}), "split.tensors.count"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_named(name: str, tmp_path: Path) -> None:
    raw, problem = HOSTILE[name]
    path = write(tmp_path, raw)
    with pytest.raises(ModelFileError, match=problem) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


def test_fuzz(tmp_path: Path) -> None:
    outcomes = fuzz(read_gguf, tmp_path / "mutant.gguf", good(), 10_000, seed=1)
    assert min(outcomes.values()) > 100


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fuzz_long(tmp_path: Path, record_property: Any) -> None:
    record_property("outcomes", fuzz(read_gguf, tmp_path / "mutant.gguf", good(), 1_000_000, seed=2))
