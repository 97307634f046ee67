"""The pack cache: a second start maps it; damage, other files and full disks are survived."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from slipstream.kernels.native import NativeBackend, _native
from slipstream.kernels.native import executable as executable_module
from slipstream.kernels.native.pack_cache import HUGE_PAGE
from slipstream.models import read_config, record_program
from slipstream.models.weights import ModelWeights
from slipstream.weights import StoredTensor
from slipstream.weights.gguf import read_gguf
from tests.conftest import write_tiny_gguf
from tests.stepping import run_alone


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "cache" / "packed"


def start(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, int]:
    """Logits of a fresh start, and how many matrices were packed for it."""
    packed = 0
    original = executable_module.pack

    def counting(*arguments: object) -> None:
        nonlocal packed
        packed += 1
        original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(executable_module, "pack", counting)
    checkpoint = read_gguf(path)
    config = read_config(checkpoint)
    program, weights = record_program(config, max_len=64), ModelWeights(config, checkpoint)
    result = run_alone(NativeBackend(2, files=(path,)).compile(program, weights, 2), [1, 2, 3, 4])
    monkeypatch.setattr(executable_module, "pack", original)
    return result, packed


def test_the_file_is_let_go_as_it_is_packed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first start holds the packed weights and no second copy of them."""
    path, released = tmp_path / "m.gguf", []
    monkeypatch.setattr(StoredTensor, "release", lambda tensor: released.append(tensor.name))
    write_tiny_gguf(path)
    _, packed = start(path, monkeypatch)
    assert len(released) == packed > 5
    assert "token_embd.weight" in released


def test_second_start_damage_and_other_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    expected, packed = start(path, monkeypatch)
    assert packed > 5
    again, packed = start(path, monkeypatch)
    assert packed == 0
    assert np.array_equal(again, expected)
    file = next(folder.glob("*.pack"))
    good = file.read_bytes()
    for damaged in (good[:-9000], good[:5000], b"", b"SLIPPACK" + b"\xff" * 5000, flipped(good)):
        file.write_bytes(damaged)
        again, packed = start(path, monkeypatch)
        assert packed > 5
        assert np.array_equal(again, expected)
    write_tiny_gguf(path, seed=1)
    other, packed = start(path, monkeypatch)
    assert packed > 5
    assert not np.array_equal(other, expected)


def flipped(raw: bytes) -> bytes:
    data = bytearray(raw)
    data[len(data) // 2] ^= 1
    return bytes(data)


def test_a_disk_that_refuses_costs_a_warning(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    folder.parent.mkdir(parents=True)
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        start(path, monkeypatch)
    assert "not kept" in caplog.text


def test_old_models_are_forgotten(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(10):
        path = tmp_path / f"{seed}.gguf"
        write_tiny_gguf(path, seed=seed)
        start(path, monkeypatch)
    assert len(list(folder.glob("*.pack"))) == 8


def test_processes_share_what_is_packed(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    checkpoint = read_gguf(path)
    config = read_config(checkpoint)
    program, weights = record_program(config, max_len=64), ModelWeights(config, checkpoint)
    NativeBackend(2, files=(path,)).compile(program, weights, 2)
    file = str(next(folder.glob("*.pack")))
    assert file not in Path("/proc/self/maps").read_text()
    second = NativeBackend(2, files=(path,)).compile(program, weights, 2)
    assert file in Path("/proc/self/maps").read_text()
    del second


def test_without_huge_pages_weights_are_copied(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, hidden=512)
    expected, _ = start(path, monkeypatch)
    file = next(folder.glob("*.pack"))
    assert file.stat().st_size > 2 * HUGE_PAGE
    monkeypatch.setattr(_native, "mapped_huge", lambda data: 0)
    again, packed = start(path, monkeypatch)
    assert packed == 0
    assert str(file) not in Path("/proc/self/maps").read_text()
    assert np.array_equal(again, expected)


def test_what_cannot_be_mapped(tmp_path: Path) -> None:
    file = tmp_path / "short"
    file.write_bytes(bytes(HUGE_PAGE + 100))
    assert not _native.map_file(str(file), HUGE_PAGE, 100).any()
    for path, offset, size in ((file, HUGE_PAGE, 101), (tmp_path / "none", 0, 1), (tmp_path, 0, 1)):
        with pytest.raises(OSError, match=path.name):
            _native.map_file(str(path), offset, size)
    with pytest.raises(ValueError, match="2 MiB"):
        _native.map_file(str(file), 100, 1)


def test_checksums_see_every_byte() -> None:
    data = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    base = _native.checksum(data)
    for at in range(1000):
        data[at] ^= 1
        assert _native.checksum(data) != base
        data[at] ^= 1
    assert _native.checksum(data[:-1]) != base
