"""Weights that are no numbers, of models and of drafters (class 7)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.speculation.folders import dspark_folder, eagle3_folder

PROGRAM = """
import json, sys
from slipstream.engine import Engine, LoadOptions
from slipstream.engine.drafters import Speculative, load_speculative, verification_of
from slipstream.program.sampling import SamplingParams
from tests.speculation.scripted import FREE
model, speculative, rule = sys.argv[1:]
options, drawing = LoadOptions(max_rows=64, threads=1), "own" if rule == "rejection" else None
loaded, controller = load_speculative(model, options, Speculative.parse(speculative), drawing=drawing)
engine = Engine(loaded, FREE, controller=controller, verification=verification_of(rule))
for settings in ({"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 1}, {"top_k": 9, "logprobs": 5}, {"top_p": 0.5},
                 {"min_p": 0.1}, {"logit_bias": {5: 3.0}}, {"allowed_tokens": (3, 4)},
                 {"temperature": 0.0, "logprobs": 3, "frequency_penalty": 1.0}):
    params = SamplingParams(**{"temperature": 0.7, "seed": 1, "max_tokens": 20, "ignore_eos": True, **settings})
    chunks = [*engine.run(engine.add([1, 2, 3] * 12, params))]
    engine.check()
    print(json.dumps([token for chunk in chunks for token in chunk.token_ids]))
"""


class Test7Numbers:
    """Weights that are no numbers make logits that are none: what is said then has no sense, and ends nothing."""

    def said(self, model: Path, speculative: str = "off", rule: str = "exact") -> list[list[int]]:
        """What an engine of its own says in many ways."""
        command = [sys.executable, "-c", PROGRAM, str(model), speculative, rule]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr[-2000:]
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert all(len(answer) == 20 and all(0 <= token < 259 for token in answer) for answer in answers)
        return answers

    @pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 3e38])
    def test_a_models(self, tiny_gguf: Path, tmp_path: Path, number: float) -> None:
        raw, norm = tiny_gguf.read_bytes(), np.ones(64, "<f4").tobytes()
        assert raw.count(norm) == 5
        (tmp_path / "odd.gguf").write_bytes(raw.replace(norm, np.full(64, number, "<f4").tobytes()))
        assert len(self.said(tmp_path / "odd.gguf")) == 9

    @pytest.fixture(scope="class")
    def plain(self, tiny_gguf: Path) -> list[list[int]]:
        return self.said(tiny_gguf)

    @pytest.mark.parametrize(
        ("folder", "number"), [(eagle3_folder, np.nan), (eagle3_folder, np.inf), (dspark_folder, np.inf)]
    )
    def test_a_drafters(
        self, tiny_gguf: Path, tmp_path: Path, plain: list[list[int]], folder: Any, number: float
    ) -> None:
        """The answers are those of plain decoding; by rejection, where there is one answer only."""
        path = folder(tmp_path / "drafter") / "model.safetensors"
        raw = path.read_bytes()
        size = 8 + int.from_bytes(raw[:8], "little")
        numbers = np.frombuffer(raw[size : size + (len(raw) - size) // 8 * 8], "<f4").copy()
        header = json.loads(raw[8:size])
        for entry in (entry for name, entry in header.items() if entry.get("dtype") == "F32"):
            first, last = (offset // 4 for offset in entry["data_offsets"])
            numbers[first:last:3] = number
        path.write_bytes(raw[:size] + numbers.tobytes() + raw[size + numbers.nbytes :])
        assert self.said(tiny_gguf, f"{path.parent},only") == plain
        rejected = self.said(tiny_gguf, f"{path.parent},only", "rejection")
        assert [rejected[index] for index in (0, 2, 8)] == [plain[index] for index in (0, 2, 8)]
