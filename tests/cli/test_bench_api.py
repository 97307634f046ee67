"""slipstream bench structured and restart, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.bench.bombs import BOMBS
from slipstream.bench.schemas import schemas
from tests.cli.test_cli import run


def test_schemas_are_schemas() -> None:
    from jsonschema import Draft202012Validator

    made = schemas(300)
    assert made == schemas(300)
    assert made[:50] != schemas(50, 1)
    for schema in made:
        Draft202012Validator.check_schema(schema)
    text = json.dumps(made)
    for word in ("$ref", "pattern", "enum", "anyOf", "minItems", "multipleOf", "exclusiveMinimum", "format", "const"):
        assert f'"{word}"' in text, word


def test_structured(smollm: Path, tmp_path: Path) -> None:
    out = tmp_path / "structured.json"
    done = run("bench", "structured", str(smollm), "--schemas", "6", "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["valid"] == 1.0
    assert found["refused"] == []
    assert found["overall_speed"] > 0
    assert "| structured answers, " in run("bench", "table", str(tmp_path)).stdout


def test_bombs(tiny_gguf: Path, tmp_path: Path) -> None:
    """Each is answered or refused, while a stream goes on; the record says so, and the table tells the dearest."""
    out = tmp_path / "bombs.json"
    done = run("bench", "structured", str(tiny_gguf), "--bombs", "--turns", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["bombs"].keys() == BOMBS.keys()
    statuses = {name: entry["status"] for name, entry in found["bombs"].items()}
    assert {statuses[name] for name in ("deep", "wide", "no reference", "brackets", "a circle of two")} == {400}
    assert {status for name, status in statuses.items() if "backtracking" in name} == {200}
    slowest = max(entry["seconds"]["median"] for entry in found["bombs"].values())
    assert found["bombs"][found["dearest"]]["seconds"]["median"] == slowest > 0
    assert all(entry["tpot"]["median"] > 0 for entry in found["bombs"].values())
    row = next(line for line in run("bench", "table", str(tmp_path)).stdout.splitlines() if "| schema bombs, " in line)
    assert f"the dearest ({found['dearest']})" in row


def test_restart(tiny_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "restart.json"
    done = run("bench", "restart", str(tiny_gguf), "--prompt", "300", "--turns", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["stored_bytes"] > 0
    assert 200 < found["cached_tokens"] < 300
    assert "| prefix store, " in run("bench", "table", str(tmp_path)).stdout
