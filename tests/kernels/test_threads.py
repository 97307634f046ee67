"""Threads: as many as the cores that a process may use, never more, and parked when there is nothing to do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slipstream.engine import Engine, LoadOptions, load_model
from slipstream.kernels.native import NativeExecutable, _native, usable_cores
from slipstream.program import Row, Rows
from slipstream.program.sampling import SamplingParams
from tests.engine.test_jitter import collect

ASK = [sys.executable, "-m", "slipstream", "generate"]


def generate(model: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*ASK, str(model), "-p", "x", "--max-tokens", "2", *options]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60)


def test_not_more_than_there_are_cores(tiny_gguf: Path) -> None:
    cores = usable_cores()
    assert generate(tiny_gguf, "--threads", str(cores)).returncode == 0
    for refused in (generate(tiny_gguf, "--threads", str(cores + 1)),
                    generate(tiny_gguf, SLIPSTREAM_THREADS=str(cores + 1))):  # fmt: skip
        assert refused.returncode == 2
        assert f"may use {cores} cores" in refused.stderr
        assert "Traceback" not in refused.stderr


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_affinity_counts() -> None:
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); " \
           "from slipstream.kernels.native import usable_cores; print(usable_cores())"  # fmt: skip
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "1"


@pytest.mark.parametrize(("groups", "files", "cores"), [
    ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
    ("0::/\n", {"cpu.max": "max 100000"}, None),
    ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),
    ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "100000 100000"}, 1.0),
    ("0::/host/path\n", {"cpu.max": "300000 100000"}, 3.0),
    ("5:memory:/m\n3:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000",
                                        "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 0.5),
    ("3:cpuacct,cpu:/docker/x\n0::/\n", {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
    ("1:cpu:/a\n0::/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000",
                           "unified/a/cpu.max": "250000 100000"}, 2.5),
    ("2:cpuset:/a\nnonsense\n", {"cpuset/a/cpu.max": "1 100000"}, None),
    ("", {}, None),
])  # fmt: skip
def test_control_groups_count(groups: str, files: dict[str, str], cores: float | None, tmp_path: Path) -> None:
    """Version 2 and 1, in one's own group and under one that is limited, by a host's paths and a container's."""
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mount" / name).write_text(text + "\n")
    granted = _native.cgroup_cores(str(tmp_path / "groups"), str(tmp_path / "mount"))
    assert granted == cores if cores is not None else granted > 1e6


def test_python_goes_on_while_a_step_runs(tiny_gguf: Path) -> None:
    """A step is one call that holds no lock of Python's: others run until its end."""
    model = load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1))
    assert isinstance(model.executable, NativeExecutable)
    model.executable.executor.set_delay("attention", 0.1)
    rows = Rows.of([Row(0, 1, 0, 0, -1, True)], [[0]])
    stepping, turns = threading.Thread(target=model.executable.step, args=(rows, None)), 0
    stepping.start()
    while stepping.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 10


def test_they_rest_between_steps(tiny_gguf: Path) -> None:
    """What a pool uses of the processor after its last step is next to nothing, however long it waits."""
    model = load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=4))
    engine = Engine(model)
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    collect(engine.run(engine.add([1, 2, 3], params)))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1, "three threads that spin would take a second and a half"
