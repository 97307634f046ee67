"""slipstream bench idle-training: a training runs in its turns, between requests, and in no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.bench.idle_training import measure
from slipstream.bench.machine import described
from slipstream.bench.table import results_table
from slipstream.errors import SlipstreamError
from slipstream.training.store import TrafficStore
from tests.cli.test_cli import run

OPTIONS = ("--kv-cache-gb", "0.02", "--max-model-len", "256", "--threads", "1")


def test_with_a_training_and_without(tiny_gguf: Path, tiny_traffic: Path, tmp_path: Path) -> None:
    told: list[int] = []
    found = measure(
        str(tiny_gguf), tiny_traffic, OPTIONS, requests=2, turns=2, pause=2.0, quiet=0.2, prompt=8, answer=4,
        progress=lambda title, done, total: told.append(done),
    )  # fmt: skip
    assert told == [1, 2]
    assert found["trained_seconds"]["with_it"] > 0.0
    assert found["trained_seconds"]["without"] == 0.0
    for name in ("ttft", "tpot"):
        assert found["with_it"][name]["median"] > 0
        assert found["idle_training"][name]["min"] > 0
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine" / "idle.json").write_text(json.dumps(described(found)))
    assert "| a training in idle time, " in results_table(tmp_path)


def test_a_training_that_cannot_run_is_told(tiny_gguf: Path, tmp_path: Path) -> None:
    with TrafficStore(tmp_path / "empty.db"):
        pass
    with pytest.raises(SlipstreamError, match="ended early"):
        measure(
            str(tiny_gguf), tmp_path / "empty.db", OPTIONS, requests=1, turns=50, pause=4.0, quiet=0.2, prompt=8,
            answer=4, progress=lambda title, done, total: None,
        )  # fmt: skip
    refused = run("bench", "idle-training", str(tiny_gguf), "--traffic", str(tmp_path / "empty.db"), "--pause", "2")
    assert (refused.returncode, "--pause must be more than 3" in refused.stderr) == (2, True)
