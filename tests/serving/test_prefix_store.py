"""A live server's prefix store: what was known is known after a restart, and what is wrong with it is told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.serving.conftest import KEY, LIMITED, Server, start, stop

PROMPT = "a beginning that many requests have in common, long enough to fill some blocks of the cache: " * 3


def serving(model: Path, folder: Path, *options: str) -> Server:
    keys = ("--api-key", KEY, "--api-key", LIMITED)
    return start(
        model, *keys, "--threads", "1", "--kv-cache-gb", "0.01", "--prefix-store", str(folder), *options
    )  # fmt: skip


def ask(server: Server, key: str = KEY, **fields: Any) -> tuple[str, int]:
    """An answer, and how much of its prompt was known."""
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 1.0, "seed": 1, "ignore_eos": True, **fields}
    with server.client() as http:
        answer = http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
    report = answer.json()
    return report["choices"][0]["text"], report["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_what_was_known_is_known_after_a_restart(tiny_gguf: Path, tmp_path: Path) -> None:
    first = serving(tiny_gguf, tmp_path / "store")
    text, cached = ask(first)
    assert cached == 0
    stop(first)  # at once: what is not on disk yet is put there before it ends
    assert first.process.returncode == 0
    files = sorted((tmp_path / "store").iterdir())
    assert len(files) == (len(PROMPT) + 20) // 32
    assert all(path.stat().st_mode & 0o077 == 0 for path in [tmp_path / "store", *files])
    second = serving(tiny_gguf, tmp_path / "store")
    assert ask(second, LIMITED) == (text, 0), "another key finds nothing"
    assert ask(second, cache_salt="x") == (text, 0), "nor another salt"
    assert ask(second) == (text, len(PROMPT) // 32 * 32)
    with second.client() as http:
        assert "damaged" not in "".join(second.log)
        assert http.get("/health").status_code == 200
    stop(second)


def test_damage_is_told_and_survived(tiny_gguf: Path, tmp_path: Path) -> None:
    first = serving(tiny_gguf, tmp_path)
    text, _ = ask(first)
    stop(first)
    for path in tmp_path.iterdir():
        path.write_bytes(b"no block at all")
    second = serving(tiny_gguf, tmp_path)
    assert ask(second) == (text, 0)
    stop(second)
    end = time.monotonic() + 10
    while "is damaged and is computed again" not in (said := "".join(second.log)) and time.monotonic() < end:
        time.sleep(0.05)
    assert "is damaged and is computed again" in said
    assert "Traceback" not in said
