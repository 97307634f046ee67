"""A training that was killed or stopped goes on where it was, to the same weights; another in its folder does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slipstream.errors import UsageError
from slipstream.training import trainer
from slipstream.training.records import Record
from slipstream.training.store import TrafficStore, Which
from slipstream.training.trainer import STATE
from slipstream.training.training import prepare, read_until, train
from tests.training.test_training import OPTIONS, other_prompts, trained, weights

PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path
import slipstream.training.trainer as trainer
from tests.training.test_training import trained
trainer.SAVE_EVERY = 0.0
kind, generic, start = sys.argv[4], *(Path(name) if name else None for name in sys.argv[5:])
layout = "eagle3" if kind == "eagle3" else "speculators"
wanted = {"rounds": 12, "kind": kind, "layout": layout, "generic": generic, "start_from": start}
trained(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), **wanted)
"""


@pytest.mark.parametrize(("kind", "mixed"), [("eagle3", False), ("dspark", False), ("eagle3", True)])
def test_a_killed_training_goes_on_to_the_same_weights(
    kind: str, mixed: bool, tiny_gguf: Path, tiny_traffic: Path, tiny_records: list[Record], tmp_path: Path
) -> None:
    """Of both kinds; from another drafter, with generic answers mixed in, too. What it took is counted together."""
    wanted: dict[str, Any] = {"rounds": 12, "kind": kind, "layout": "eagle3" if kind == "eagle3" else "speculators"}
    if mixed:
        trained(tiny_gguf, tiny_traffic, tmp_path / "first", rounds=2)
        wanted |= {"generic": other_prompts(tiny_records, tmp_path / "g.db"), "start_from": tmp_path / "first"}
    trained(tiny_gguf, tiny_traffic, tmp_path / "whole", **wanted)
    command = [
        sys.executable, "-c", PROGRAM, str(tiny_gguf), str(tiny_traffic), str(tmp_path / "killed"), kind,
        str(wanted.get("generic", "")), str(wanted.get("start_from", "")),
    ]  # fmt: skip
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": "."})
    state = tmp_path / "killed" / STATE
    deadline = time.monotonic() + 120
    while not state.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.002)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with safe_open(state, "pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
    about = json.loads(metadata["about"])
    assert min(about["spent"][name] for name in ("wall_seconds", "cpu_seconds")) > 0
    about["spent"] |= {"wall_seconds": 1e7, "cpu_seconds": 2e7}  # more than going on can take, so that it shows
    save_file(load_file(state), state, metadata | {"about": json.dumps(about)})
    begun = time.perf_counter()
    card = trained(tiny_gguf, tiny_traffic, tmp_path / "killed", **wanted)
    assert card["resumed"]
    assert 0 < card["wall_seconds"] - 1e7 < time.perf_counter() - begun
    assert card["cpu_seconds"] > 2e7
    whole, killed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


def test_a_stopped_training_goes_on_when_there_is_more_traffic(
    tiny_gguf: Path, tiny_records: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came after it began is not for it; another training in its folder is refused."""
    file, folder = tmp_path / "t.db", tmp_path / "d"
    with TrafficStore(file) as store:
        store.add(tiny_records[:50])

    def some(count: int, folder: Path = folder) -> dict[str, Any]:
        with TrafficStore(file) as store:
            options = replace(OPTIONS, rounds=4)
            prepared = prepare(str(tiny_gguf), store.records(Which(before=read_until(folder))), [], options)
        if count < 4:
            monkeypatch.setattr(trainer, "SAVE_EVERY", 0.0)
            check = trainer.Trainer._save

            def save(self: trainer.Trainer) -> None:
                check(self)
                if self.round == count:
                    raise KeyboardInterrupt

            monkeypatch.setattr(trainer.Trainer, "_save", save)
        try:
            return train(prepared, options, folder)
        finally:
            monkeypatch.undo()

    assert read_until(folder) is None
    with pytest.raises(KeyboardInterrupt):
        some(2)
    with TrafficStore(file) as store:
        store.add(tiny_records[50:])
        with pytest.raises(UsageError, match="another training was stopped"):
            train(prepare(str(tiny_gguf), store.records(), [], OPTIONS), replace(OPTIONS, rounds=4), folder)
        same = list(store.records(Which(before=read_until(folder))))
        for records, changes, said in (
            (same[3:], {"rounds": 4}, r"with other traffic \(answers it learned from were deleted"),
            (same, {"rounds": 5, "layers": 2}, "with other layers, rounds: "),
        ):
            options = replace(OPTIONS, **changes)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match=said):
                train(prepare(str(tiny_gguf), records, [], options), options, folder)
    card = some(4)
    assert card["resumed"]
    assert card["newest"] == tiny_records[49].time
    assert read_until(folder) is None
    assert some(4, tmp_path / "e")["newest"] == tiny_records[-1].time
