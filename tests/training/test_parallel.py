"""Several processes: a training that lost one of them goes on, all together, to what it would have come to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.training.trainer import STATE
from slipstream.training.training import CARD
from tests.training.test_training import weights

PROGRAM = """
import os
import sys
from pathlib import Path

import slipstream.training.trainer as trainer
from tests.training.test_training import trained

target, traffic, folder = map(Path, sys.argv[1:])
trainer.SAVE_EVERY = 0.0
folder.parent.joinpath("pid" + os.environ["RANK"]).write_text(str(os.getpid()))
trained(target, traffic, folder, rounds=12)
"""


def begun(folder: Path, target: Path, traffic: Path) -> subprocess.Popen[str]:
    """torchrun with two processes."""
    program = folder.parent / "program.py"
    program.write_text(PROGRAM)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone",
        str(program), str(target), str(traffic), str(folder),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "."}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def ended(process: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said[-3000:]
    return dict(json.loads((folder / CARD).read_text()))


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_what_lost_a_process_goes_on_to_the_same(
    killed: int, tiny_gguf: Path, tiny_traffic: Path, tmp_path: Path
) -> None:
    """The one that writes the state, or the other: torchrun ends both, and the same command goes on."""
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    undisturbed = ended(begun(whole, tiny_gguf, tiny_traffic), whole)
    process = begun(folder, tiny_gguf, tiny_traffic)
    deadline = time.monotonic() + 240
    while not (folder / STATE).exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(int((tmp_path / f"pid{killed}").read_text()), signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode != 0
    assert (folder / STATE).exists(), "it was not done yet"
    card = ended(begun(folder, tiny_gguf, tiny_traffic), folder)
    assert card["resumed"]
    for name in ("tokens", "loss", "tau", "acceptance"):
        assert card["curve"][name] == undisturbed["curve"][name], name
    first, second = weights(whole), weights(folder)
    assert all(torch.equal(first[name], second[name]) for name in first)
