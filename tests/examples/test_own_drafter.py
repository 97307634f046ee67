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
    assert summary["command"] == " ".join(["python", *command[1:]])
    assert summary["machine"]["cores"] > 0
    assert {"version", "date"} <= summary.keys()
    assert summary["reports"].keys() == {"maths-later", "foreign-tale"}
    for name, report in summary["reports"].items():
        assert report["served"]["identical"], name
        assert report["served"]["contenders"].keys() == {
            "plain", "n-gram", "suffix", "own", "generic", "own, 5 always"
        }  # fmt: skip
        assert report["leaks"] == []
        assert (out / f"eval-{name}.svg").exists()
    figure = (out / "own-drafter.svg").read_text()
    assert all(f">{name}: tau, K = 5<" in figure for name in summary["reports"])
    taus = {name: entry[""]["tau"] for name, entry in summary["reports"]["maths-later"]["replayed"].items()}
    assert taus["own"] > 1.0
    again = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "training: own" not in again.stdout
    assert "eval: " not in again.stdout


def test_data_from_public_sets(tmp_path: Path) -> None:
    """In the shapes that they are published in; what is asked later was not asked before, and no maths is mixed in."""
    words = " ".join(f"w{n}" for n in range(80))
    files: dict[str, object] = {
        "train": [{"question": f"q{n}", "answer": "#### 1"} for n in range(5)],
        "test": [{"question": f"q{n}", "answer": "#### 1"} for n in range(3, 9)],
        "bench": [
            *({"category": c, "turns": [f"say {c}", "again"]} for c in ("qa", "math_reasoning", "translation")),
            *({"category": "qa", "turns": [f"Go on:  {n}   {words}"]} for n in range(300)),
            {"category": "code", "turns": ["Please write:  def  f():\n\n\n# done"]},
        ],
        "ifeval": [{"key": 1, "prompt": "write"}],
        "code": [{"task_id": "x", "prompt": "def f():\n"}],
    }
    for name, rows in files.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))  # type: ignore[arg-type, call-overload]
    (tmp_path / "wiki").write_text("\n".join([" = A head = ", "short", *(f"{n} {words}" for n in range(300))]))
    command = [
        sys.executable, str(SCRIPT.with_name("prepare.py")), str(tmp_path / "data"), "--maths", str(tmp_path / "train"),
        "--maths-later", str(tmp_path / "test"), "--mixed", str(tmp_path / "bench"), str(tmp_path / "ifeval"),
        "--code", str(tmp_path / "code"), "--text", str(tmp_path / "wiki"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = {path.stem: [json.loads(line) for line in path.read_text().splitlines()]
             for path in (tmp_path / "data").iterdir()}  # fmt: skip
    assert [row["question"] for row in found["maths"]] == ["q0", "q1", "q2", "q3", "q4"]
    assert [row["question"] for row in found["maths-later"]] == ["q5", "q6", "q7", "q8"]
    mixed = {row["messages"][0]["content"] for row in found["mixed"]}
    others = {text for text in mixed if text.startswith("Go on:")}
    assert mixed - others == {"say qa", "say translation", "write"}
    asked = ["".join(row["prompt"].split()) for row in found["foreign-wiki"]]
    assert 0 < len(others) <= 100
    assert not any(one in "".join(text.split()) for text in others for one in asked)
    assert "def f" in found["foreign-code"][0]["messages"][0]["content"]
    assert len(found["foreign-wiki"]) == 200
    assert len(found["foreign-wiki"][0]["prompt"].split()) == 48
