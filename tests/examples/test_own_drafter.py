"""The example runs from prompts to figures, in small."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "own_drafter" / "own_drafter.py"


def prompts(path: Path, seed: int, count: int) -> None:
    """Sums in words."""
    rng, things = random.Random(seed), ("apples", "pens", "books", "coins")
    rows = []
    for _ in range(count):
        a, b, what = rng.randrange(2, 60), rng.randrange(2, 60), rng.choice(things)
        rows.append({"question": f"Ann has {a} {what} and buys {b} more. How many {what} does she have now?"})
    path.write_text("\n".join(map(json.dumps, rows)))


def test_from_prompts_to_figures(smollm: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    prompts(data / "maths.jsonl", 0, 60)
    prompts(data / "maths-later.jsonl", 1, 30)
    subjects = ("the sea", "a train", "winter", "bread", "a garden", "the moon", "rain", "a bridge", "music", "tea")
    rows = [{"messages": [{"role": "user", "content": f"Tell me something about {what}."}]} for what in subjects]
    (data / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (data / "foreign-tale.jsonl").write_text(json.dumps({"prompt": "Once upon a time there was a king who"}))
    command = [sys.executable, str(SCRIPT), str(data), "--out", str(out), "--model", str(smollm), "--small"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["reports"].keys() == {"maths-later", "foreign-tale"}
    for name, report in summary["reports"].items():
        assert report["served"]["identical"], name
        assert report["served"]["contenders"].keys() == {
            "plain", "n-gram", "suffix", "own", "generic", "own, 5 always"
        }  # fmt: skip
        assert report["leaks"] == []
        assert (out / f"eval-{name}.svg").exists()
    taus = {name: entry[""]["tau"] for name, entry in summary["reports"]["maths-later"]["replayed"].items()}
    assert taus["own"] > 1.0
    again = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "training: own" not in again.stdout
    assert "eval: " not in again.stdout
