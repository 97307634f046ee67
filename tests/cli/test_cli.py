"""The commands as a user runs them: output, JSON, exit codes, errors that name the next step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.conftest import write_tiny_gguf

COMMAND = [sys.executable, "-c", "from slipstream.cli import main; main()"]


def run(*arguments: str, stdin: str = "", timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=timeout)


def test_generate(tiny_gguf: Path) -> None:
    arguments = (
        "generate",
        str(tiny_gguf),
        "-p",
        "hello",
        "--seed",
        "1",
        "--max-tokens",
        "8",
        "--ignore-eos",
    )
    out = run(*arguments, "--json")
    assert out.returncode == 0, out.stderr
    report = json.loads(out.stdout)
    assert len(report["token_ids"]) == 8
    assert report["finish_reason"] == "length"
    assert {"prompt_tokens", "decode_tok_s", "ceiling_tok_s", "fraction_of_ceiling", "isa"} <= report["timings"].keys()
    again = json.loads(run(*arguments, "--json", "--threads", "1").stdout)
    assert again["token_ids"] == report["token_ids"]
    people = run(*arguments).stderr
    assert people.startswith(f"{tiny_gguf} on {report['timings']['isa']}, {report['timings']['threads']} threads\n")
    assert "of the ceiling" in people
    several = json.loads(run(*arguments, "--json", "-n", "2", "--logprobs", "1").stdout)
    assert several["choices"][0]["token_ids"] == report["token_ids"]
    assert len(several["choices"][1]["logprobs"]) == 8
    chat = run("generate", str(tiny_gguf), "-p", "-", "--chat", "--max-tokens", "2", stdin="hi")
    assert chat.returncode == 0, chat.stderr


@pytest.mark.parametrize("backend", ["reference", "torch", "torch:cpu", "torch:cpu:bf16", "torch:bf16"])
def test_other_backends(tiny_gguf: Path, backend: str) -> None:
    out = run(
        "generate", str(tiny_gguf), "-p", "hello", "--backend", backend, "--max-tokens", "4", "--json",
        "--temperature", "0", "--ignore-eos",
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    assert len(json.loads(out.stdout)["token_ids"]) == 4


@pytest.mark.parametrize("backend", ["cuda", "torch:nowhere", "torch:cpu:int3", "reference:bf16", "native:cpu"])
def test_backends_that_there_are_not(tiny_gguf: Path, backend: str) -> None:
    out = run("generate", str(tiny_gguf), "-p", "hello", "--backend", backend)
    assert out.returncode == 2
    assert out.stderr.startswith("slipstream: ")
    assert "Traceback" not in out.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("generate", "nowhere", "-p", "x"), 2, "pypi:package==version"),
        (("generate", "MODEL", "-p", "x", "--temperature", "-1"), 2, "temperature must be from 0.0 to 100.0"),
        (("generate", "MODEL", "-p", "x", "--kv-cache-dtype", "fp9"), 2, "bf16 or int8"),
        (("generate", "MODEL", "-p", "x", "--max-model-len", "99999"), 2, "model's context of 512"),
        (("generate", "MODEL", "-p", "x" * 600), 2, "--max-model-len"),
        (("generate", "MODEL", "-p", "x", "--system", "y"), 2, "--chat"),
        (("generate", "MODEL", "-p", "x", "--logit-bias", "a=b"), 2, "TOKEN=BIAS"),
        (("generate", "BROKEN", "-p", "x"), 1, "magic"),
        (("pull", "hf:nobody"), 2, "hf:org/name"),
        (("pull", "pypi:x; rm -rf"), 2, "pypi:name==version"),
        (("bench", "decode", "MODEL", "--rows", "x"), 2, "--rows"),
        (("generate",), 2, "MODEL"),
    ],
)
def test_errors(arguments: tuple[str, ...], code: int, words: str, tiny_gguf: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    names = {"MODEL": str(tiny_gguf), "BROKEN": str(broken)}
    out = run(*(names.get(argument, argument) for argument in arguments))
    assert out.returncode == code, out.stderr
    assert words in out.stderr
    assert "Traceback" not in out.stderr


def test_chat(tiny_gguf: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    lines = f"hello\n/nonsense\nagain\n/save {saved}\n/reset\n/save {saved}.reset\n/exit\nnever\n"
    out = run("chat", str(tiny_gguf), "--max-tokens", "3", "--json", "--seed", "1", stdin=lines)
    assert out.returncode == 0, out.stderr
    answers = [json.loads(line) for line in out.stdout.splitlines()]
    assert [len(answer["token_ids"]) for answer in answers] == [3, 3]
    assert answers[0]["timings"]["generated_tokens"] == 3
    assert "no command /nonsense" in out.stderr
    assert [m["role"] for m in json.loads(saved.read_text())] == ["user", "assistant"] * 2
    assert json.loads(Path(f"{saved}.reset").read_text()) == []


SAID = " and on" * 16


def write_endless_gguf(path: Path) -> None:
    """A model that says one thing over and over, as long as its context lets it."""
    write_tiny_gguf(path, says=SAID)
    output = next(t for t in gguf.GGUFReader(path, "r+").tensors if t.name == "output.weight")
    following = np.zeros((1, 64), np.float32)
    following[0, :2] = 9.0  # whatever came before
    output.data[259] = gguf.quants.quantize(following, gguf.GGMLQuantizationType.Q8_0)[0]


def test_chat_streams_and_control_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    """Its pipe is narrow: it cannot come to an answer's end before what it says is read."""
    model, cut, whole = tmp_path / "endless.gguf", tmp_path / "cut.json", tmp_path / "whole.json"
    write_endless_gguf(model)
    command = [*COMMAND, "chat", str(model), "--temperature", "0", "--speculative", "off"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pipesize=4096,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )  # fmt: skip
    assert process.stdin
    assert process.stdout
    process.stdin.write("hello\n")
    process.stdin.flush()
    begun = os.read(process.stdout.fileno(), 4096).decode()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(f"/save {cut}\n/reset\nhello\n/save {whole}\n/exit\n", timeout=60)
    assert process.returncode == 0, err
    part, full = (json.loads(file.read_text())[-1]["content"] for file in (cut, whole))
    assert len(full) > 40_000
    assert full.startswith(part)
    assert len(begun) % len(SAID) == 0, "tokens are shown one by one, not as a buffer fills"
    assert 0 < len(begun) <= len(part) < 20_000, "it was heard before it ended, and ended when it was told to"


def test_bench(tiny_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    out = run("bench", "decode", str(tiny_gguf), "--rows", "1,4", "--turns", "5", "--json", "--out", str(file))
    assert out.returncode == 0, out.stderr
    report = json.loads(out.stdout)
    keys = "tok_s bytes_per_token read_gb_s ceiling_tok_s fraction_of_ceiling step_seconds command machine date spread"
    assert set(keys.split()) <= report.keys()
    assert set(report["step_seconds"]) == {"1", "4"}
    assert json.loads(file.read_text()) == report
    out = run("bench", "prefill", str(tiny_gguf), "--tokens", "100", "--turns", "1", "--json")
    assert {"tok_s", "ops", "peak_ops"} <= json.loads(out.stdout).keys()
    table = run("bench", "table", str(tmp_path)).stdout
    assert "| decode, " in table
    assert report["command"] in table


def test_bench_host(tiny_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    out = run("bench", "host", str(tiny_gguf), "--sequences", "1,3", "--turns", "1", "--out", str(file))
    assert "outside its kernels" in out.stdout, out.stderr
    report = json.loads(file.read_text())
    modes, busy = report["host"]["3"], report["busy"]
    assert min(busy["alone"], busy["adapting"], busy["all_threads"]) > 0
    assert modes["after"]["outside_kernels"] > 0
    assert modes["after"]["hidden"] < modes["after"]["outside_kernels"]
    assert modes["ahead"]["hidden"] > 0
    recorded = run("bench", "table", str(tmp_path)).stdout
    assert "outside the kernels" in recorded
    assert "keeps a core busy" in recorded


def test_bench_start(tiny_gguf: Path) -> None:
    out = run("bench", "start", str(tiny_gguf), "--turns", "1", "--json")
    assert out.returncode == 0, out.stderr
    report = json.loads(out.stdout)
    assert 0 < report["later_starts"]["seconds"] < 30
    assert report["first_start"]["peak_bytes"] > 10e6
    assert 1e4 < report["weight_bytes"] < tiny_gguf.stat().st_size
    size = report["installed"]
    assert size["bytes"] == sum(size["by_package"].values()) > size["by_package"]["numpy"] > 10e6
    assert size["packages"] == len(size["by_package"])
    assert {"slipstream", "tokenizers", "markupsafe"} <= set(size["by_package"])  # jinja2 needs markupsafe
    assert not {"torch", "pytest", "httpx"} & set(size["by_package"])  # extras are somebody else's
    missing = run("bench", "start", "no-such-model")
    assert missing.returncode == 2


STUB_PEER = """
__version__ = "stub"
import sys, time
class Llama:
    def __init__(self, file, **options): pass
    def reset(self): pass
    def eval(self, tokens):
        if {fail}: sys.exit(3)
        time.sleep(0.02 * len(tokens))
"""


@pytest.mark.parametrize("fail", [False, True])
def test_bench_peers(tiny_gguf: Path, tmp_path: Path, fail: bool) -> None:
    (tmp_path / "llama_cpp.py").write_text(STUB_PEER.format(fail=fail))
    arguments = ("bench", "peers", str(tiny_gguf), "--llama-cpp", sys.executable, "--turns", "1", "--prompt", "8")
    command = [*COMMAND, *arguments, "--context", "4", "--json"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    out = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    if fail:
        assert out.returncode == 1
        assert "the peer ended with code 3" in out.stderr
        return
    report = json.loads(out.stdout)
    assert report["peer"] == "llama.cpp (llama-cpp-python stub)"
    assert 0 < report["peer_decode_tok_s"] <= 50
    assert 0 < report["peer_prefill_tok_s"] <= 50
    assert report["decode_ratio"] == pytest.approx(report["decode_tok_s"] / report["peer_decode_tok_s"], rel=0.1)


def test_quality(tiny_gguf: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    arguments = ("quality", str(tiny_gguf), "--text", str(text), "--tokens", "300", "--context", "128", "--json")
    report = json.loads(run(*arguments).stdout)
    assert report["tokens"] == 300
    assert 0 < report["mean_kl"] < 0.01
    assert report["top1_agreement"] > 0.9
    coarse = json.loads(run(*arguments, "--kv-cache-dtype", "int8").stdout)
    assert coarse["mean_kl"] != report["mean_kl"]
    by_others = json.loads(run(*arguments, "--reference", "transformers").stdout)
    assert by_others["mean_kl"] == pytest.approx(report["mean_kl"], rel=0.02)
    assert "numpy or transformers" in run(*arguments, "--reference", "x").stderr
    assert "--text" in run("quality", str(tiny_gguf), "--text", str(tmp_path / "none")).stderr


def test_pull_says_where(tiny_gguf: Path) -> None:
    report = json.loads(run("pull", str(tiny_gguf), "--json").stdout)
    assert report["path"] == str(tiny_gguf)
    assert report["architecture"] == "llama"


def test_the_default_model_writes_sense(smollm: Path) -> None:
    out = run(
        "generate",
        str(smollm),
        "-p",
        "The capital of France is",
        "--temperature",
        "0",
        "--max-tokens",
        "3",
        "--json",
    )
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout)["text"].startswith(" Paris")
