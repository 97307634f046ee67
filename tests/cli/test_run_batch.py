"""slipstream run-batch and collect-env."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import UsageError
from slipstream.serving.batch import Done, answered, read_batch, run_batch
from tests.cli.test_cli import run


def line(name: str, url: str = "/v1/completions", **body: Any) -> str:
    given = {"model": "tiny", "prompt": f"abc {name}", "max_tokens": 6, "temperature": 0.0, **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": given})


def test_a_batch_and_the_rest_of_it(tiny_gguf: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "abc"}])
    rows = [*(line(f"r{n}") for n in range(12)), chat, line("e", "/v1/embeddings", input="abc"),
            line("bad", temperature=-1), line("stream", stream=True), line("other", "/v1/files")]  # fmt: skip
    source.write_text("\n".join(rows[:8]) + "\n")
    common = (
        "run-batch", str(tiny_gguf), "-i", str(source), "-o", str(out), "--served-model-name", "tiny", "--threads", "1",
        "--max-model-len", "256",
    )  # fmt: skip
    first = run(*common)
    assert first.returncode == 0, first.stderr
    assert "8 answered, 0 failed" in first.stdout
    before = out.read_text().splitlines()
    out.write_text("\n".join(before) + "\n" + before[0][:40])  # killed while it wrote
    source.write_text("\n".join(rows))
    again = run(*common, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == {"answered": 6, "failed": 3, "known": 8}
    found = {row["custom_id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert len(found) == len(out.read_text().splitlines()) == 17
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    assert found["e"]["response"]["body"]["object"] == "list"
    assert found["bad"]["response"]["status_code"] == 400
    assert found["stream"]["error"]["code"] == "invalid_request"
    assert found["r3"]["response"]["body"]["choices"][0]["text"]


def test_a_name_that_comes_again_is_an_error(tmp_path: Path) -> None:
    """Its first line is answered, in whatever run, and once; each later one is told so, and counts as failed."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked: list[str] = []
    statuses = [429, 429, 400, 400, 400]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(json.loads((await receive())["body"])["prompt"])
        await send({"type": "http.response.start", "status": statuses.pop(0), "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def answer(*prompts: str) -> Done:
        source.write_text("\n".join(line(name, prompt=f"{name} {at}") for at, name in enumerate(prompts)))
        return asyncio.run(run_batch(app, read_batch(source), out, 2, lambda _: None))

    def rows() -> list[tuple[str, Any]]:
        found = [json.loads(row) for row in out.read_text().splitlines()]
        return sorted((row["custom_id"], (row["error"] or {}).get("code") or "") for row in found)

    told = [("a", ""), ("a", "duplicate_custom_id"), ("a", "duplicate_custom_id"), ("b", "")]
    for failed, known in ((4, 0), (4, 0), (2, 2)):
        done = answer("a", "b", "a", "a")
        assert (done.answered, done.failed, done.known) == (0, failed, known)
        assert rows() == told
    assert asked == ["a 0", "b 1"] * 2, "again where it was too busy, and no other time"
    assert answer("a", "b", "c").known == 2, "what is mended is mended"
    assert rows() == [("a", ""), ("b", ""), ("c", "")]


def alive(pid: str) -> bool:
    """Whether a process runs; one that ended may stay listed until its parent has taken note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_batch_that_is_killed_goes_on(tiny_gguf: Path, tmp_path: Path) -> None:
    """kill -9 in the midst of it: the second run answers the rest, everything once, and no engine is left behind."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(f"r{n}", max_tokens=150, ignore_eos=True) for n in range(60)))
    common = (
        "run-batch", str(tiny_gguf), "-i", str(source), "-o", str(out), "--served-model-name", "tiny", "--threads", "1",
        "--max-model-len", "256", "--at-once", "2", "--json",
    )  # fmt: skip
    command = [sys.executable, "-m", "slipstream", *common]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        end, engines = time.monotonic() + 60, ""
        while not (out.exists() and out.read_text().count("\n") >= 3) and time.monotonic() < end:
            found = subprocess.run(["pgrep", "-P", str(first.pid)], capture_output=True, text=True, check=False)
            engines = found.stdout or engines
        first.kill()
    assert engines
    known = out.read_text().count("\n")
    assert 3 <= known < 60
    again = run(*common)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == {"answered": 60 - known, "failed": 0, "known": known}
    names = [json.loads(row)["custom_id"] for row in out.read_text().splitlines()]
    assert sorted(names) == sorted(f"r{n}" for n in range(60))
    end = time.monotonic() + 10
    while any(alive(pid) for pid in engines.split()):
        assert time.monotonic() < end, "an engine outlived its server"
        time.sleep(0.1)


def test_what_may_go_better_another_time_is_asked_again(tmp_path: Path) -> None:
    """An engine that was being started again, a queue that was full; what was wrong in itself stays answered."""
    file = tmp_path / "out.jsonl"
    rows = [
        {"custom_id": str(status), "response": {"status_code": status}, "error": None}
        for status in (200, 400, 429, 500, 503, 504)
    ]
    wrong = {"custom_id": "stream", "response": None, "error": {"code": "invalid_request"}}
    file.write_text("\n".join(map(json.dumps, [*rows, wrong])) + "\n")
    assert answered(file) == {"200", "400", "stream"}
    assert [json.loads(row)["custom_id"] for row in file.read_text().splitlines()] == ["200", "400", "stream"]
    assert list(tmp_path.iterdir()) == [file]


def test_what_is_no_batch(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    for text in ("{}", "[1]", "no JSON", '{"custom_id": 5}'):
        file.write_text(text)
        with pytest.raises(UsageError, match="line 1"):
            list(read_batch(file))
    file.write_text("something else\nand more\n")
    with pytest.raises(UsageError, match="no batch's output"):
        answered(file)
    assert answered(tmp_path / "none") == set()


def test_collect_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "sk-very-secret")
    monkeypatch.setenv("SLIPSTREAM_THREADS", "1")
    shown = run("collect-env")
    assert shown.returncode == 0, shown.stderr
    assert "numpy:" in shown.stdout
    assert "sk-very-secret" not in shown.stdout
    found = json.loads(run("collect-env", "--json").stdout)
    assert found["variables"]["SLIPSTREAM_THREADS"] == "1"
    assert found["variables"]["SLIPSTREAM_API_KEY"] == "(set)"
    assert found["machine"]["isa"]
