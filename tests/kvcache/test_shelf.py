"""The shelf: blocks come back as they were or not at all; damage, a full disk and other owners are survived."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.kvcache import Shelf
from slipstream.kvcache.shelf import MAGIC, SCRATCH
from slipstream.program import BLOCK_SLOTS, KVFormat, Namespace

SIZE = 4096
NAMESPACE = Namespace("m", "numerics", KVFormat.BF16, salt="tenant/")
KEY = tuple(range(BLOCK_SLOTS))


def shelf(folder: Path, most: int = 1 << 20, size: int = SIZE, origin: str = "weights") -> Shelf:
    return Shelf(folder, most, size, origin)


def content(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)


def put(one: Shelf, seed: int = 0) -> str:
    name = one.name(one.root(NAMESPACE), (*KEY[:-1], seed))
    assert one.write(name, (*KEY[:-1], seed), content(seed))
    return name


def test_what_was_put_there_comes_back(tmp_path: Path) -> None:
    names = [put(shelf(tmp_path), seed) for seed in range(5)]
    again, into = shelf(tmp_path), np.zeros(SIZE, np.uint8)
    assert len(again) == 5
    for seed, name in enumerate(names):
        assert again.has(name)
        assert again.read(name, (*KEY[:-1], seed), into)
        assert np.array_equal(into, content(seed))
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    "change", [{"model": "n"}, {"numerics": "o"}, {"kv_format": KVFormat.INT8}, {"adapter": "a"}, {"salt": "other/"}]
)
def test_nobody_finds_anothers(tmp_path: Path, change: dict[str, object]) -> None:
    one = shelf(tmp_path)
    assert one.root(replace(NAMESPACE, **change)) != one.root(NAMESPACE)  # type: ignore[arg-type]
    assert shelf(tmp_path, origin="other weights").root(NAMESPACE) != one.root(NAMESPACE)
    assert shelf(tmp_path, size=2 * SIZE).root(NAMESPACE) != one.root(NAMESPACE)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damage_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A flipped bit, a cut, something appended, anywhere: the block is not taken, and its file is gone."""
    folder = tmp_path_factory.mktemp("shelf")
    name = put(shelf(folder))
    path = folder / f"{name}.block"
    raw = bytearray(path.read_bytes())
    kind, at = data.draw(st.sampled_from(["flip", "cut", "grow"])), data.draw(st.integers(0, len(raw) - 1))
    if kind == "flip":
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        raw = raw[:at] if kind == "cut" else raw + b"x" * (at % 100 + 1)
    path.write_bytes(raw)
    one, into = shelf(folder), np.zeros(SIZE, np.uint8)
    assert not one.read(name, (*KEY[:-1], 0), into) or np.array_equal(into, content(0))
    if one.damaged:
        assert not path.exists()
        assert not one.has(name)
        assert not into.any(), "nothing of it was taken"


def test_another_files_content_is_not_taken(tmp_path: Path) -> None:
    """Whole, but of other tokens: as if two names were the same."""
    one = shelf(tmp_path)
    a, b = put(one, 0), put(one, 1)
    (tmp_path / f"{a}.block").write_bytes((tmp_path / f"{b}.block").read_bytes())
    assert not one.read(a, (*KEY[:-1], 0), np.zeros(SIZE, np.uint8))
    lie = MAGIC + json.dumps({"hash": 5, "tokens": None}).encode() + b"\n" + bytes(SIZE)
    (tmp_path / f"{b}.block").write_bytes(lie)
    assert not one.read(b, (*KEY[:-1], 1), np.zeros(SIZE, np.uint8))
    assert one.damaged == 2


def test_the_least_lately_used_makes_room(tmp_path: Path) -> None:
    one = shelf(tmp_path, most=3 * (SIZE + 400))
    names = [put(one, seed) for seed in range(3)]
    assert one.read(names[0], (*KEY[:-1], 0), np.zeros(SIZE, np.uint8))
    put(one, 3)
    assert [one.has(name) for name in names] == [True, False, True]
    assert one.bytes <= one.most_bytes
    assert one.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_a_full_disk_ends_writing_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = shelf(tmp_path)
    name = put(one)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        assert not one.write("another", KEY, content(1))
    assert one.stopped is not None
    assert "space" in one.stopped
    assert not one.write("another", KEY, content(1))
    assert one.read(name, (*KEY[:-1], 0), np.zeros(SIZE, np.uint8))
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.block"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """But not what another one is writing."""
    left, young = tmp_path / f".{'a' * 32}.77{SCRATCH}", tmp_path / f".{'b' * 32}.78{SCRATCH}"
    left.write_bytes(b"half of a block")
    young.write_bytes(b"half of another")
    os.utime(left, (1e9, 1e9))
    assert len(shelf(tmp_path)) == 0
    assert (left.exists(), young.exists()) == (False, True)


def test_files_that_others_remove_meanwhile(tmp_path: Path) -> None:
    """Another process moves its files while this one begins: those that lead nowhere are as good as gone."""
    name = put(shelf(tmp_path))
    for gone in (f"{'c' * 32}.block", f".{'d' * 32}.79{SCRATCH}"):
        (tmp_path / gone).symlink_to(tmp_path / "nowhere")
    one = shelf(tmp_path)
    assert len(one) == 1
    assert one.read(name, (*KEY[:-1], 0), np.zeros(SIZE, np.uint8))


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SlipstreamError, match="cannot keep"):
        shelf(tmp_path / "file")
