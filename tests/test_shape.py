"""benchmarks/shape.py: a Llama of any shape, which loads and answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from slipstream.engine import LoadOptions, load_model
from tests.stepping import run_alone

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "shape.py"


def test_a_shape(tiny_gguf: Path, tmp_path: Path) -> None:
    to = tmp_path / "shape.gguf"
    shape = ("--layers", "3", "--width", "128", "--heads", "4", "--kv-heads", "2", "--mlp", "192")
    subprocess.run([sys.executable, SCRIPT, tiny_gguf, to, *shape], check=True, timeout=60)
    model = load_model(str(to), LoadOptions(max_rows=8, threads=1))
    config = model.config
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.ffn) == (3, 128, 4, 2, 192)
    assert run_alone(model.executable, [1, 2, 3])[-1].std() > 0
