"""The device probe on torch's CPU device: the same code that measures a GPU, ranks included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.kernels.torch.instruments import DeviceInstruments
from slipstream.roofline import find_hardware
from slipstream.roofline.hardware import add_hardware
from tests.cli.test_cli import run


def test_measures() -> None:
    probe = DeviceInstruments("cpu", copy_bytes=1 << 20, product=64).measure(most_ranks=2)
    assert probe.bandwidth > 1e7
    assert {"bf16", "f32"} <= probe.peak.keys()
    assert all(peak > 1e6 for peak in probe.peak.values())
    assert 0 < probe.launch < 1e-2
    assert set(probe.collective) == {2}
    assert 0 < probe.collective[2] < 1


def test_a_device_that_is_not_there() -> None:
    out = run("probe", "--device", "cuda:7")
    assert out.returncode == 2
    assert "--device cuda:7" in out.stderr
    assert run("probe", "--save-as", "x").returncode == 2


def test_kept_as_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    add_hardware("My GPU", {"bandwidth_gb_s": 1000, "tops": {"bf16": 100}})
    add_hardware("other", {"bandwidth_gb_s": 10})
    assert find_hardware("my-gpu").operations("bf16") == 100e12
    assert set(json.loads((tmp_path / "config" / "hardware.json").read_text())) == {"my-gpu", "other"}
