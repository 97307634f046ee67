"""Every stored type against the gguf package's own dequantisation, and the packed formats against both."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from slipstream.kernels.native import _native
from slipstream.program import TENSOR_TYPES
from slipstream.weights.dequantize import dequantize
from tests.blocks import random_blocks

ROWS, COLUMNS = 21, 512


@pytest.mark.parametrize("name", TENSOR_TYPES)
def test_equals_the_gguf_package(name: str) -> None:
    kind = TENSOR_TYPES[name]
    raw = random_blocks(kind, ROWS, COLUMNS, np.random.default_rng(3))
    quantization = getattr(gguf.GGMLQuantizationType, name)
    expected = gguf.quants.dequantize(raw, quantization).reshape(-1)
    actual = dequantize(raw.reshape(-1), kind)
    assert np.abs(expected).max() > 0
    assert np.array_equal(actual, expected)
    assert (kind.block, kind.bytes) == gguf.GGML_QUANT_SIZES[quantization]
    assert kind.code == quantization.value


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("Q4_0", "i4s"),
        ("Q4_1", "i4m"),
        ("Q5_0", "i5s"),
        ("Q5_1", "i5m"),
        ("Q8_0", "i8"),
        ("Q3_K", "i6k"),
        ("Q4_K", "i4k"),
        ("Q5_K", "i5k"),
        ("Q6_K", "i6k"),
        ("IQ4_NL", "i8"),
        ("MXFP4", "i8"),
        ("BF16", "bf16"),
        ("F16", "f16"),
        ("F32", "f32"),
    ],
)
def test_packing_loses_nothing(name: str, packed: str) -> None:
    kind = TENSOR_TYPES[name]
    raw = random_blocks(kind, ROWS, COLUMNS, np.random.default_rng(4)).reshape(-1)
    order = np.random.default_rng(5).permutation(ROWS).astype(np.int64)
    matrix = _native.Matrix(packed, ROWS, COLUMNS, _native.allocate(_native.packed_bytes(packed, ROWS, COLUMNS)))
    _native.Packer(2).pack(kind.code, raw, kind.nbytes(COLUMNS), 0, order, matrix)
    expected = dequantize(raw, kind).reshape(ROWS, COLUMNS)[order]
    row = np.empty(COLUMNS, np.float32)
    for index in range(ROWS):
        matrix.unpack_row(index, row)
        # d * scale * q and (d * scale) * q round differently; nothing else may differ.
        assert np.allclose(row, expected[index], rtol=3e-7, atol=1e-9)


def on_the_widest_grid(values: np.ndarray, group: int, steps: float) -> float:
    """The squared error of rounding to a grid of `steps` steps up to each group's largest number."""
    padded = np.zeros(-(-len(values) // group) * group, np.float32)
    padded[: len(values)] = values
    groups = padded.reshape(-1, group)
    scale = (np.abs(groups).max(-1, keepdims=True) / np.float32(steps)).astype(np.float16).astype(np.float32)
    rounded = np.clip(np.rint(groups / scale), -np.ceil(steps), np.floor(steps)) * scale
    return float(np.square(rounded - groups).sum())


@pytest.mark.parametrize(
    ("packed", "step"),
    [("i8", 1 / 127), ("i4s", 1 / 7), ("i4s64", 1 / 7), ("i4s128", 1 / 7), ("i4m", 1 / 15), ("i4m64", 1 / 15),
     ("i4m128", 1 / 15), ("i5s", 1 / 15), ("i5m", 1 / 31)],
)  # fmt: skip
def test_floats_are_quantised_to_the_nearest_step(packed: str, step: float) -> None:
    columns = 200  # no whole number of groups
    values = np.random.default_rng(6).standard_normal((ROWS, columns)).astype(np.float32)
    matrix = _native.Matrix(packed, ROWS, columns, _native.allocate(_native.packed_bytes(packed, ROWS, columns)))
    rows = np.arange(ROWS, dtype=np.int64)
    _native.Packer(1).pack(0, values.reshape(-1).view(np.uint8), columns * 4, 0, rows, matrix)
    row = np.empty(columns, np.float32)
    for index in range(ROWS):
        matrix.unpack_row(index, row)
        if packed in ("i4s", "i4s64", "i4s128", "i5s"):  # a finer grid may cut off the largest for the sake of the rest
            error, group = np.square(row - values[index]).sum(), 32 * int(packed[3:] or 32) // 32
            assert error <= 1.001 * on_the_widest_grid(values[index], group, 7.5 if packed[1] == "4" else 15.5)
            continue
        reach = (values[index].max() - values[index].min()) if "m" in packed else 2 * np.abs(values[index]).max()
        assert np.abs(row - values[index]).max() <= 0.52 * reach * step + 2e-3


def test_packing_refuses_what_does_not_fit() -> None:
    data = _native.allocate(_native.packed_bytes("i4s", 4, 32))
    matrix = _native.Matrix("i4s", 4, 32, data)
    packer, raw = _native.Packer(1), np.zeros(4 * 18, np.uint8)
    with pytest.raises(ValueError, match="outside the stored"):
        packer.pack(2, raw, 18, 0, np.array([0, 1, 2, 4], np.int64), matrix)
    with pytest.raises(ValueError, match="one source row"):
        packer.pack(2, raw, 18, 0, np.arange(3, dtype=np.int64), matrix)
    with pytest.raises(ValueError, match="cannot be packed"):
        packer.pack(3, raw, 18, 0, np.arange(4, dtype=np.int64), matrix)
    with pytest.raises(ValueError, match="packed_bytes"):
        _native.Matrix("i4s", 5, 64, data)
