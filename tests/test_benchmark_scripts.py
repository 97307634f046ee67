"""Scripts in benchmarks/: a Llama of any shape, a drafter with random weights, prompts that ask for files again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from slipstream.bench.prompts import read_talks
from slipstream.engine import LoadOptions, load_model
from tests.speculation.folders import eagle3_folder
from tests.stepping import run_alone

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


def run(script: str, *arguments: str | Path) -> None:
    subprocess.run([sys.executable, SCRIPTS / script, *arguments], check=True, timeout=60)


def test_a_shape(tiny_gguf: Path, tmp_path: Path) -> None:
    to = tmp_path / "shape.gguf"
    run("shape.py", tiny_gguf, to, "--layers", "3", "--width", "128", "--heads", "4", "--kv-heads", "2", "--mlp", "192")
    model = load_model(str(to), LoadOptions(max_rows=8, threads=1))
    config = model.config
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.ffn) == (3, 128, 4, 2, 192)
    assert run_alone(model.executable, [1, 2, 3])[-1].std() > 0


def test_a_drafter_that_learned_nothing(tmp_path: Path) -> None:
    source = eagle3_folder(tmp_path / "source")
    run("scramble.py", source, tmp_path / "to")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "to"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        old, new = (np.asarray(t.float()).ravel() for t in (tensor, after[name]))
        if tensor.is_floating_point() and tensor.ndim > 1:
            assert abs(np.corrcoef(old, new)[0, 1]) < 0.2
            assert 0.7 * old.std() <= new.std() <= 1.4 * old.std()
        else:
            assert np.array_equal(old, new)


def test_files_to_be_written_again(tmp_path: Path) -> None:
    run("rewriting.py", SCRIPTS / "shape.py", SCRIPTS / "rewriting.py", "--out", tmp_path / "rewrite.jsonl")
    one, other = read_talks(tmp_path / "rewrite.jsonl", 5)
    assert one.category == "rewrite"
    assert "def make(" in one.turns[0]
    assert "`prompts`" in other.turns[0] or "renamed to" in other.turns[0]
    assert len(json.loads((tmp_path / "rewrite.jsonl").read_text().splitlines()[0])["messages"]) == 1
