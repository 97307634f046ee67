"""slipstream bench serve and replay, on a tiny model, with little of everything."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from slipstream.bench import serve as bench_serve
from slipstream.bench.load import Sample
from slipstream.bench.metered import OUTSIDE_KERNELS
from slipstream.bench.serve import _gaps, measure, server
from slipstream.bench.table import results_table
from slipstream.bench.trace import Arrival, at_rate, infinite_cache_hits, read_trace
from slipstream.errors import UsageError
from slipstream.program import BLOCK_SLOTS
from tests.cli.test_cli import run

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1200, "output_length": 10, "hash_ids": [0, 1, 3]},
    {"timestamp": 3500, "input_length": 1300, "output_length": 30, "hash_ids": [4, 5, 6]},
]


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE)
    return file


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    file = tmp_path / "mooncake.jsonl"
    file.write_text("\n".join(map(json.dumps, MOONCAKE)))
    return file


def test_traces_are_read_and_scaled(azure: Path, mooncake: Path) -> None:
    first, second, third = read_trace(azure, 10, 0.1, 1000, 200)
    assert (len(first.prompt), first.answer) == (37, 4)
    assert (second.at, third.at) == (pytest.approx(4.314579), pytest.approx(4.541877))
    assert [len(a.prompt) for a in read_trace(azure, 10, 1.0, 300, 200)] == [255, 190, 244], "cut to the context"
    same, alike, other = read_trace(mooncake, 10, 1 / 16, 1000, 200)
    assert [len(a.prompt) for a in (same, alike, other)] == [69, 75, 81]
    assert same.prompt[:64] == alike.prompt[:64] != other.prompt[:64]
    assert same.prompt[64:69] != alike.prompt[64:69]
    assert [a.at for a in (same, alike, other)] == [0.0, 2.0, 2.5]
    slow = at_rate([same, alike, other], 0.5)
    assert [a.at for a in slow] == pytest.approx([0.0, 3.2, 4.0])
    assert len(read_trace(mooncake, 2, 1.0, 4000, 200)) == 2


def test_what_an_infinite_cache_would_find() -> None:
    common, end = list(range(2 * BLOCK_SLOTS)), [7] * BLOCK_SLOTS
    arrivals = [Arrival(0.0, prompt, 1) for prompt in ([*common, 1, 2], [*common, 3], common, end + common)]
    assert infinite_cache_hits(arrivals) == 2 * BLOCK_SLOTS + BLOCK_SLOTS, "the last token is always computed"


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "{", '{"timestamp": 1}'])
def test_no_traces(tmp_path: Path, text: str) -> None:
    for name in ("trace.csv", "trace.jsonl"):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError):
            read_trace(tmp_path / name, 5, 1.0, 100, 100)
    with pytest.raises(UsageError):
        read_trace(tmp_path / "missing.csv", 5, 1.0, 100, 100)


def test_bench_replay(tiny_gguf: Path, mooncake: Path, tmp_path: Path) -> None:
    file = tmp_path / "replay.json"
    arguments = ("bench", "replay", str(tiny_gguf), "--trace", str(mooncake), "--scale", "0.0625", "--out", str(file))
    out = run(*arguments, "--max-model-len", "512", "--load", "0.5", "--slo-ttft", "10", "--slo-tpot", "10")
    assert "goodput" in out.stdout
    report = json.loads(file.read_text())
    assert report["requests"] == 3
    assert report["good_share"] == 1.0
    assert report["prompt_tokens"] == 69 + 75 + 81
    assert report["infinite_cache_tokens"] == 64
    assert 0 <= report["cached_tokens"] <= 64
    assert "of the most" in results_table(tmp_path)
    assert run(*arguments, "--load", "0").returncode == 2


def test_bench_serve_beside_another(tiny_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "beside.json"
    with server(str(tiny_gguf), ["--kv-cache-gb", "0.01"]) as other:
        url = f"http://{other.at.host}:{other.at.port}"
        arguments = ("bench", "serve", str(tiny_gguf), "--beside", url, "--precision-beside", "the same")
        out = run(*arguments, "--streams", "1,3", "--prompt", "8", "--answer", "4", "--out", str(file))
    assert "the same" in out.stdout
    report = json.loads(file.read_text())
    assert set(report["beside"]) == {"1", "3"}
    assert len(report["beside"]["3"]["ratios"]) == 3
    assert report["served"]["weights"].startswith("Q8_0")
    assert report["served"]["kv_cache"] == "bf16"
    assert "beside" in results_table(tmp_path)
    assert run("bench", "serve", str(tiny_gguf), "--beside", url).returncode == 2


def test_bench_serve(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = {"LONG_PROMPT": 100, "CACHED_PROMPT": 100, "IDLE_SECONDS": 0.2, "ALONE_ANSWER": 300, "BESIDE_ANSWER": 100}
    for name, value in (smaller | {"INTERFERENCE_TURNS": 1}).items():
        monkeypatch.setattr(bench_serve, name, value)
    result = measure(str(tiny_gguf), ["--kv-cache-dtype", "bf16"], [1, 2], 8, 8, lambda *_: None)
    assert set(result["serve_streams"]) == {"1", "2"}
    assert result["idle"]["resident_bytes"] > result["idle"]["beyond_weights_bytes"] > 0
    assert result["one_stream"]["ratio"] > 0
    host = result["serve_streams"]["2"]["host_us"]
    assert host["outside_kernels"] == pytest.approx(sum(host[part] for part in OUTSIDE_KERNELS))
    assert min(host[part] for part in ("scheduling", "dispatch", "output")) > 0
    assert host["server_us_a_token"] >= 0, "counted in hundredths of a second, which so few tokens need not take"
    assert 8 * 6 / 2 <= host["steps"] <= 8 * 6 + 20, "six answers of eight tokens, at most two at a time"
    assert result["half_load"]["p99_tpot_over_alone"] > 0
    assert result["half_load_with_target"]["tpot_target"] > 0


def test_gaps_while_a_prompt_comes_in() -> None:
    """Only while all streams have begun, and of those only the ones that the prompt's time touches."""
    streams = [Sample(0.0, [1.0, 2.0, 4.0, 8.0, 16.0]), Sample(0.0, [3.0, 5.0, 9.0])]
    assert _gaps(streams, 0.0, math.inf) == [2.0, 4.0, 8.0, 2.0, 4.0]
    assert _gaps(streams, 4.5, 6.0) == [4.0, 2.0, 4.0]


def test_what_recording_costs(tiny_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    options = ("--streams", "2", "--prompt", "8", "--answer", "8", "--turns", "2", "--max-model-len", "128")
    out = run("bench", "record", str(tiny_gguf), *options, "--threads", "1", "--out", str(file))
    assert out.returncode == 0, out.stderr
    report = json.loads(file.read_text())
    assert report["recorded"] == 6
    assert report["recording"]["median"] > 0
    assert min(report["server_us_a_token"], report["server_us_a_token_without"]) >= 0.0
    assert "| recording traffic, " in results_table(tmp_path)
