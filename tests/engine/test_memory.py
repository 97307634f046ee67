"""Memory at the start: the defaults keep within what is free, and what was asked for and cannot fit is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.engine import LoadOptions, load_model
from slipstream.engine import model as room
from slipstream.engine.explain import native_executable
from slipstream.engine.model import CACHE_SHARE, MOST_SEQUENCES, SPARE_SHARE, buffer_bytes, share_memory
from slipstream.errors import UsageError
from slipstream.program import BLOCK_SLOTS

LENGTH, BLOCK, WEIGHTS = 10 * BLOCK_SLOTS, 1000, 40_000
"""A sequence takes ten blocks."""
SERVER = {"sequences": 0, "spare_bytes": -1}


def shared(monkeypatch: pytest.MonkeyPatch, free: int, weights: int = WEIGHTS, **options: object) -> tuple[int, int]:
    monkeypatch.setattr(room, "available_memory", lambda: free)
    monkeypatch.setattr(room, "usable_memory", lambda: 10**12)
    return share_memory(LoadOptions(**options), LENGTH, BLOCK, weights)  # type: ignore[arg-type]


def test_defaults_are_shares_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, spare = shared(monkeypatch, WEIGHTS + 100_000, **SERVER)
    assert (blocks, spare) == (CACHE_SHARE * 100, SPARE_SHARE * 60)
    assert shared(monkeypatch, 10**9, **SERVER) == (10 * MOST_SEQUENCES, 10 * MOST_SEQUENCES)
    assert shared(monkeypatch, WEIGHTS + 12_000, **SERVER) == (10, 0), "a full sequence in any case"
    beside = (20_000, 1000)
    assert shared(monkeypatch, WEIGHTS + 100_000, beside=beside, **SERVER) == (16, 2), "a drafter's are counted"
    asked = {"sequences": 0, "spare_bytes": 80_000}
    assert shared(monkeypatch, WEIGHTS + 100_000, **asked) == (20, 80), "the default makes room for what was asked for"


@pytest.mark.parametrize(
    ("free", "options"),
    [
        (9_000, SERVER),
        (-40_000, SERVER),
        (50_000, {"cache_bytes": 51_000}),
        (50_000, {"cache_bytes": 30_000, "spare_bytes": 21_000}),
        (50_000, {"cache_bytes": 30_000, "beside": (1_000, 700)}),
        (50_000, {"sequences": 6}),
        (50_000, {"sequences": 0, "spare_bytes": 45_000}),
        (50_000, {"cache_bytes": 9_000}),
    ],
)
def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, free: int, options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="GB of weights"):
        shared(monkeypatch, WEIGHTS + free, **options)


def test_what_just_fits_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared(monkeypatch, WEIGHTS + 50_000, cache_bytes=30_000, spare_bytes=20_000) == (30, 20)
    assert shared(monkeypatch, 0, backend="torch:cuda", sequences=2) == (20, 0), "that memory is another"


def test_the_refusal_has_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as refused:
        shared(monkeypatch, 7 * 10**9, 4 * 10**9, cache_bytes=3 * 10**9, spare_bytes=10**9)
    said = str(refused.value)
    for number in ("3.00 GB of cache", "1.00 GB for", "4.00 GB of weights", "7.00 GB are free", "of 1000.00"):
        assert number in said


def test_a_model_is_weighed_as_it_will_be_held(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there for the weights only leaves no room for a cache, whatever the machine has."""
    monkeypatch.setattr(room, "available_memory", lambda: tiny_gguf.stat().st_size)
    with pytest.raises(UsageError, match="do not fit into memory"):
        load_model(str(tiny_gguf), LoadOptions(threads=1, cache_bytes=1 << 20))


@pytest.mark.parametrize("rows", [1, 64, 512])
def test_buffers_are_weighed_too(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """What is there for weights and cache only is too little: logits and activations come with the first large step."""
    options = LoadOptions(threads=1, max_rows=rows, cache_bytes=1 << 20)
    model = load_model(str(tiny_gguf), options)
    executable = native_executable(model)
    foreseen = buffer_bytes(executable.program, rows)
    assert model.buffer_bytes <= 1.05 * foreseen <= 1.5 * model.buffer_bytes
    needed = executable.weight_bytes + (1 << 20)
    monkeypatch.setattr(room, "available_memory", lambda: needed + foreseen // 2)
    with pytest.raises(UsageError, match="of weights and buffers"):
        load_model(str(tiny_gguf), options)


def test_a_cache_that_is_really_too_large(tiny_gguf: Path) -> None:
    """It is refused at the start, not ended under load."""
    for options in (("--kv-cache-gb", "100000"), ("--kv-cache-gb", "0.01", "--kv-offload-gb", "100000")):
        command = [sys.executable, "-m", "slipstream", "serve", str(tiny_gguf), "--port", "0", *options]
        out = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert out.returncode == 2, out.stderr
        assert "do not fit into memory" in out.stderr
        assert "100000.00 GB" in out.stderr
        assert "Traceback" not in out.stderr
