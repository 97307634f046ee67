"""Shapes from files: a GGUF header alone, a config.json, and what both say of the same model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.errors import UsageError
from slipstream.roofline import find_source
from slipstream.weights.gguf import read_gguf


def test_a_header_is_enough(tiny_gguf: Path, tmp_path: Path) -> None:
    whole = find_source(str(tiny_gguf))
    data = tiny_gguf.read_bytes()
    weights = sum(tensor.data.nbytes for tensor in read_gguf(tiny_gguf).tensors.values())
    header = tmp_path / tiny_gguf.name
    header.write_bytes(data[: len(data) - weights])
    assert find_source(str(header)) == whole


def test_gguf_and_config_agree(tiny_gguf: Path, tmp_path: Path) -> None:
    config = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 259, "tie_word_embeddings": True, "max_position_embeddings": 512,
        "torch_dtype": "float16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    from_gguf, from_config = find_source(str(tiny_gguf)), find_source(str(tmp_path))
    assert from_gguf.shape.layers == from_config.shape.layers
    assert from_gguf.shape.parameters == from_config.shape.parameters
    assert from_gguf.precision is not None
    assert from_gguf.precision.bits == from_gguf.precision.head == 8.5
    assert from_config.precision is not None
    assert from_config.precision.bits == 16


def test_the_default_model_is_its_named_shape(smollm: Path) -> None:
    source, named = find_source(str(smollm)), find_source("smollm2-135m")
    assert source.shape.layers == named.shape.layers
    assert source.shape.parameters == named.shape.parameters
    assert source.precision is not None
    assert source.precision.bits == 5.0
    assert source.precision.head == 8.5


@pytest.mark.parametrize("reference", ["", "no-such-model", "llama", "70x", "b"])
def test_unknown_shapes_are_named(reference: str) -> None:
    with pytest.raises(UsageError, match=r"known shape|did you mean|neither"):
        find_source(reference)
