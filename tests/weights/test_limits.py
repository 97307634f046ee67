"""Sizes and names in a model's JSON: what is too large or said twice is refused before it does harm."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import tokenizers

from slipstream.errors import ModelFileError
from slipstream.text.hf import load_hf
from slipstream.weights import Checkpoint
from slipstream.weights.safetensors import MAX_HEADER, MAX_INDEX, MAX_JSON, read_safetensors

ENTRY = '{"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}'
OTHER = '{"dtype": "F32", "shape": [4], "data_offsets": [16, 32]}'


def folder_with(path: Path, header: bytes, data: bytes = bytes(32)) -> Path:
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@pytest.mark.parametrize(
    ("header", "twice"),
    [
        (f'{{"a": {ENTRY}, "a": {OTHER}}}', "a"),
        (f'{{"a": {ENTRY}, "\\u0061": {OTHER}}}', "a"),
        (f'{{"a": {ENTRY[:-1]}, "data_offsets": [16, 32]}}}}', "data_offsets"),
        (f'{{"__metadata__": {{}}, "a": {ENTRY}, "__metadata__": {{}}}}', "__metadata__"),
    ],
)
def test_names_that_appear_twice(header: str, twice: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=rf"model\.safetensors: header: '{twice}' appears twice"):
        read_safetensors(folder_with(tmp_path, header.encode()))
    assert set(read_safetensors(folder_with(tmp_path, f'{{"a": {ENTRY}, "b": {OTHER}}}'.encode())).tensors) == {
        "a",
        "b",
    }


def padded(text: str, size: int) -> bytes:
    return text.encode() + b" " * (size - len(text))


def test_a_header_that_is_too_large(tmp_path: Path) -> None:
    header = f'{{"a": {ENTRY}}}'
    assert set(read_safetensors(folder_with(tmp_path, padded(header, MAX_HEADER))).tensors) == {"a"}
    with pytest.raises(ModelFileError, match=r"model\.safetensors: header length: is more than 16 MB"):
        read_safetensors(folder_with(tmp_path, padded(header, MAX_HEADER + 1)))


def test_a_header_of_nothing_takes_little_memory(tmp_path: Path) -> None:
    header = b'{"a": [' + b"[]," * (MAX_HEADER // 3 - 4) + b"[]]}"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelFileError, match="its entry is not an object"):
        read_safetensors(folder_with(tmp_path, header))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10  # kilobytes


@pytest.mark.parametrize(("name", "limit"), [("config.json", MAX_JSON), ("model.safetensors.index.json", MAX_INDEX)])
def test_files_beside_the_weights(name: str, limit: int, tmp_path: Path) -> None:
    text = json.dumps({"weight_map": {"a": "model.safetensors"}})
    folder_with(tmp_path, f'{{"a": {ENTRY}}}'.encode())
    (tmp_path / name).write_bytes(padded(text, limit))
    assert set(read_safetensors(tmp_path).tensors) == {"a"}
    (tmp_path / name).write_bytes(padded(text, limit + 1))
    with pytest.raises(ModelFileError, match=rf"{name}: size: is more than {limit >> 20} MB"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_files_beside_the_tokenizer(name: str, tmp_path: Path) -> None:
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    checkpoint = Checkpoint("safetensors", (tmp_path / "model.safetensors",), {}, {})
    (tmp_path / name).write_bytes(padded('{"eos_token": "a"}', MAX_JSON))
    load_hf(checkpoint)
    (tmp_path / name).write_bytes(padded('{"eos_token": "a"}', MAX_JSON + 1))
    with pytest.raises(ModelFileError, match=rf"{name}: size: is more than 16 MB"):
        load_hf(checkpoint)


def test_a_file_without_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ModelFileError, match=r"config\.json: size"):
        read_safetensors(tmp_path)
