"""ceiling, levers and probe as a user runs them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.test_cli import run


def test_ceiling_of_a_size() -> None:
    out = run("ceiling", "70b", "--precision", "fp8", "--hardware", "H200", "--json")
    assert out.returncode == 0, out.stderr
    report = json.loads(out.stdout)
    assert f"{report['ceiling_tok_s']:.1f}" == "68.6"
    assert report["fits"] is True
    assert report["knee_rows"] == 207
    assert {"bytes_per_token", "ceiling_tok_s", "knee_rows", "fits", "layers", "intensity"} <= report.keys()
    assert set(report["layers"]) == {"scheduling", "kv cache", "kernels", "precision", "parallelism", "speculation"}
    human = run("ceiling", "70b", "--precision", "fp8", "--hardware", "H200").stdout
    assert "68.6 tokens/s" in human


def test_ceiling_with_a_drafter_and_a_prompt() -> None:
    arguments = ("llama-3-8b", "--hardware", "rtx-4090", "--draft", "tau=3.2,c=0.07,k=5", "--prompt", "1000", "--json")
    report = json.loads(run("ceiling", *arguments).stdout)
    speculation = report["speculation"]
    assert 1 < speculation["speedup"] < speculation["simple_speedup"]
    assert speculation["ceiling_tok_s"] == pytest.approx(report["ceiling_tok_s"] * speculation["speedup"])
    assert report["prefill_seconds"] > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("ceiling", "no-such-shape"),
        ("ceiling", "70b", "--hardware", "abacus"),
        ("ceiling", "70b", "--hardware", "h200", "--precision", "q9"),
        ("ceiling", "70b", "--hardware", "h200", "--batch", "0"),
        ("ceiling", "70b", "--hardware", "h200", "--draft", "tau=2"),
        ("levers", "70b", "--hardware", "h200", "--at", "1"),
        ("levers", "70b", "--hardware", "h200", "--own", "nothing"),
        ("levers", "70b", "--hardware", "h200", "--verify"),
    ],
)
def test_wrong_use_is_code_2(arguments: tuple[str, ...]) -> None:
    out = run(*arguments)
    assert out.returncode == 2, out.stdout
    assert out.stderr.startswith("slipstream: ")
    assert "Traceback" not in out.stderr


def test_levers() -> None:
    arguments = ("levers", "llama-3-8b", "--hardware", "h100-sxm", "--at", "8,4096", "--own", "mine: bytes=0.5")
    report = json.loads(run(*arguments, "--json").stdout)
    names = [lever["name"] for lever in report["levers"]]
    assert "mine" in names
    assert report["levers"][-1]["one_user"] == pytest.approx(1, abs=0.01)
    assert "no help for one user" in run(*arguments).stdout


def test_probe_and_this_machine(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    assert "SLIPSTREAM_HOME" in os.environ
    report = json.loads(run("probe", "--json").stdout)
    assert report["read"]["1"]["median"] > 1e8
    assert set(report["peak"]) >= {"scalar"}
    assert (tmp_path / "cache" / "probe").is_dir()
    ceiling = json.loads(run("ceiling", str(tiny_gguf), "--json").stdout)
    assert ceiling["hardware"] == "this machine"
    assert ceiling["ceiling_tok_s"] > 100
    assert "barrier" in run("probe").stdout


def test_explain(tiny_gguf: Path, tmp_path: Path) -> None:
    plot, file = tmp_path / "w.svg", tmp_path / "explain.json"
    arguments = ("explain", str(tiny_gguf), "--max-tokens", "40", "--others", "1", "--foreign-prompt", "16")
    out = run(*arguments, "--plot", str(plot), "--json", "--out", str(file))
    assert out.returncode == 0, out.stderr
    report = json.loads(out.stdout)
    assert sum(report["parts"].values()) == pytest.approx(report["seconds_per_token"])
    assert report["verdict"].startswith("You are at ")
    assert {
        "bytes_by_class",
        "operations_by_class",
        "seconds_by_class",
        "rows",
        "counters",
        "cost_model",
    } <= report.keys()
    assert plot.read_text().startswith("<svg")
    assert "| waterfall, " in run("bench", "table", str(tmp_path)).stdout
    human = run("explain", str(tiny_gguf), "--max-tokens", "30")
    assert "You are at" in human.stdout
    series = run("explain", str(tiny_gguf), "--max-tokens", "30", "--prometheus").stdout
    assert 'slipstream_waterfall_seconds_per_token{part="ceiling"' in series


def test_explain_a_benchmark(tiny_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    assert run("bench", "decode", str(tiny_gguf), "--rows", "1", "--turns", "5", "--out", str(file)).returncode == 0
    result, report = json.loads(file.read_text()), json.loads(run("explain", str(file), "--json").stdout)
    assert report["seconds_per_token"] == pytest.approx(result["step_seconds"]["1"])
    assert sum(report["parts"].values()) == pytest.approx(report["seconds_per_token"])
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert run("explain", str(other)).returncode == 2


def test_self_test_names_each_part(tiny_gguf: Path) -> None:
    out = run("explain", str(tiny_gguf), "--self-test", "--json")
    assert out.returncode == 0, out.stderr
    verdicts = {v["part"]: v for v in json.loads(out.stdout)["self_test"]}
    assert {"scheduling", "sampling", "down", "outside", "foreign prefill"} <= verdicts.keys()
    assert all(verdicts[part]["blamed"] > 0 for part in ("scheduling", "sampling", "down", "outside"))


def test_generate_explain(tiny_gguf: Path) -> None:
    out = run("generate", str(tiny_gguf), "-p", "hello", "--explain", "--max-tokens", "300", "--ignore-eos", "--json")
    assert out.returncode == 0, out.stderr
    assert out.stderr.startswith("memory: ")
    explained = json.loads(out.stdout)["explain"]
    assert explained["expected_tok_s"] > 0
    assert explained["verdict"].startswith("You are at")
    assert sum(explained["parts"].values()) > 0


def test_bench_cost_and_levers(tiny_gguf: Path, tmp_path: Path) -> None:
    report = json.loads(run("bench", "cost", str(tiny_gguf), "--json", "--out", str(tmp_path / "c.json")).stdout)
    assert report["median_error"] > 0
    assert len(report["grid"]) > 20
    out = run("levers", str(tiny_gguf), "--at", "1,100", "--verify", "--json", "--out", str(tmp_path / "l.json"))
    assert out.returncode == 0, out.stderr
    verified = {v["name"]: v for v in json.loads(out.stdout)["verified"]}
    assert {"batch 2", "batch 16", "8-bit keys and values"} <= verified.keys()
    assert all(v["low"] <= v["measured"] <= v["high"] for v in verified.values())
    table = run("bench", "table", str(tmp_path)).stdout
    assert "| cost model, " in table
    assert "| levers, " in table
