"""The probe: what it makes of its instruments, what it keeps, and when it says that a machine is noisy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import pytest

from slipstream.kernels.native.instruments import NativeInstruments
from slipstream.roofline import probe as room


class Fake:
    """A machine of two cores that reads 10 GB/s a thread; every other turn differs by `noise`."""

    def __init__(self, noise: float = 0.0):
        self.turns = cycle((1.0, 1.0 + noise))
        self.calls = 0
        self.isas: Sequence[str] = ("fast", "slow")
        self.cores = 2

    def read_rate(self, threads: int, nbytes: int, seconds: float, *, huge_pages: bool) -> float:
        self.calls += 1
        return threads * 10e9 * next(self.turns) * (1.0 if huge_pages else 0.8)

    def peak(self, isa: str, arithmetic: str, threads: int, seconds: float) -> float:
        return {"fast": 8e12, "slow": 1e12}[isa] / {"int8": 1, "bf16": 2, "f32": 4}[arithmetic]

    def barrier(self, threads: int) -> float:
        return 1e-7

    def empty_step(self, threads: int) -> float:
        return 1e-5


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))


def test_the_machine_as_the_ceiling_sees_it() -> None:
    result = room.measure(Fake())
    machine = result.hardware()
    assert machine.bandwidth == 20e9
    assert machine.operations("int8") == 8e12
    assert machine.step_overhead == 1e-5
    assert machine.operations("fp8") == 4e12, "what is not there is done in the next wider kind"
    assert result.read_small_pages.median == 16e9
    assert not result.noisy


def test_noise_is_said() -> None:
    assert room.measure(Fake(noise=0.5)).noisy == ["read with 1 threads", "read with 2 threads"]


def test_kept_until_the_hardware_changes() -> None:
    fake = Fake()
    first = room.this_machine(fake)
    calls = fake.calls
    assert room.this_machine(fake) == first
    assert fake.calls == calls
    room.this_machine(fake, fresh=True)
    assert fake.calls > calls
    other = Fake()
    other.isas = ("slow",)
    assert room.load(other) is None
    room.probe_file(first.fingerprint).write_text("{}")
    assert room.load(fake) is None


def test_the_native_instruments_measure() -> None:
    instruments = NativeInstruments()
    in_use = instruments.isas[0]
    assert instruments.read_rate(1, 1 << 20, 0.002, huge_pages=False) > 1e8
    assert instruments.peak(instruments.isas[-1], "f32", 1, 0.002) > 1e6
    assert 0 < instruments.barrier(2) < 1e-2
    assert 0 < instruments.empty_step(2) < 1e-1
    assert instruments.isas[0] == in_use
