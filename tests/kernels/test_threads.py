"""Threads: as many as the cores that a process may use, never more, and parked when there is nothing to do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.engine import Engine, LoadOptions, load_model
from slipstream.kernels.native import usable_cores
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
