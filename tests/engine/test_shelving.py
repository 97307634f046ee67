"""Cached prefixes across restarts: the same bits, far less to compute, whatever has happened to the files."""

from __future__ import annotations

import logging
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest

from slipstream.engine import Engine, LoadOptions, Model, load_model
from slipstream.engine.engine import SHELVE_EVERY
from slipstream.engine.shelving import parse_store
from slipstream.errors import UsageError
from slipstream.kernels.backend import StepOutput
from slipstream.kernels.native import NativeExecutable
from slipstream.kvcache import Shelf
from slipstream.kvcache.shelf import MAGIC, MOST_HEADER
from slipstream.program import BLOCK_SLOTS, Rows
from slipstream.program.sampling import DrawColumns, SamplingParams
from tests.engine.test_jitter import Said, collect

PROMPT = [n % 251 for n in range(300)]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Model:
    return load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1))


def engine_of(model: Model, folder: Path, most: int = 1 << 30) -> tuple[Engine, Shelf]:
    shelf = Shelf(folder, most, model.executable.operands.cache.block_bytes, "these weights")  # type: ignore[attr-defined]
    engine = Engine(model)
    engine.keep_blocks(shelf)
    return engine, shelf


def say(engine: Engine, prompt: list[int] = PROMPT) -> tuple[Said, int]:
    number = engine.add(prompt, PARAMS)
    said = collect(engine.run(number))[0]
    engine.check()
    return said, engine.timings[number].cached_tokens


def rest(engine: Engine) -> None:
    """Nobody asks for anything."""
    while engine.shelving:
        engine.shelve()
    engine.check()


def test_a_known_beginning_outlives_the_engine(model: Model, tmp_path: Path) -> None:
    plain, _ = say(Engine(model, prefix_cache=False))
    engine, shelf = engine_of(model, tmp_path)
    assert say(engine) == (plain, 0)
    rest(engine)
    assert len(shelf) >= 9
    again, _ = engine_of(model, tmp_path)
    assert say(again) == (plain, 288)
    assert say(again) == (plain, 288), "now from the cache itself"
    rest(again)
    other, _ = engine_of(model, tmp_path)
    longer, cached = say(other, [*PROMPT, *range(40)])
    assert cached == 288
    assert longer == say(Engine(model, prefix_cache=False), [*PROMPT, *range(40)])[0]


def test_who_is_never_idle_keeps_blocks_too(model: Model, tmp_path: Path) -> None:
    """A block now and then between two steps; what is said does not change."""
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    prompt = [number % 200 for number in range(130)]
    plain = Engine(model)
    expected = [chunk.token_ids for chunk in plain.run(plain.add(prompt, params))]
    for ahead in (False, True):
        engine, shelf = engine_of(model, tmp_path / str(ahead))
        engine.ahead = ahead
        number, said = engine.add(prompt, params), []
        while engine.busy:
            said += [chunk.token_ids for chunk in engine.step() if chunk.request == number]
            if engine.busy and engine.shelving:
                engine.shelve()
        assert said == expected
        assert 2 <= len(shelf) <= 300 // SHELVE_EVERY


def test_damage_costs_time_and_nothing_else(model: Model, tmp_path: Path) -> None:
    plain, _ = say(Engine(model, prefix_cache=False))
    engine, _ = engine_of(model, tmp_path)
    say(engine)
    rest(engine)
    rng, files = random.Random(0), sorted(tmp_path.iterdir())
    for victim in rng.sample(files, 3):
        raw = bytearray(victim.read_bytes())
        raw[rng.randrange(len(raw))] ^= 64
        victim.write_bytes(raw)
    again, shelf = engine_of(model, tmp_path)
    said, cached = say(again)
    assert said == plain
    assert cached < 288
    assert shelf.damaged >= 1
    for _ in range(3):  # a damaged one is found when those before it are whole
        rest(again)
        again, _ = engine_of(model, tmp_path)
        said, cached = say(again)
        assert said == plain
    assert cached == 288, "what was damaged was written anew"


HEADERS = {
    "brackets": b"[" * 60_000, "braces": b'{"hash":' * 8_000, "numbers for all": b'{"hash": 5, "tokens": 5}',
    "a long number": b'{"hash": %s, "tokens": []}' % (b"9" * 9_000), "endless": b'{"hash": "", "tokens": [1e999]}',
    "a list": b"[]", "nothing": b"null", "a text": b'"hash"', "a number": b"7", "no tokens": b'{"hash": ""}',
    "no text": b"\xff\xfe\xff", "half a character": b'{"hash": "\\ud800"}', "no end": b"x" * (MOST_HEADER + 9),
}  # fmt: skip
"""What a block's header may be instead."""


def damaged(raw: bytes, how: str) -> bytes:
    """A block's file as it may be found."""
    match how:
        case "empty":
            return b""
        case "cut":
            return raw[: len(raw) // 2]
        case "longer":
            return raw + b"x"
        case "zeros":
            return bytes(len(raw))
        case "another kind":
            return b"GGUF" + raw
        case _ if how in HEADERS:
            return MAGIC + HEADERS[how] + b"\n" + raw[raw.index(b"\n", len(MAGIC)) + 1 :]
        case _:
            return raw[:-1] + bytes([raw[-1] ^ 1])


@pytest.mark.parametrize("how", ["empty", "cut", "longer", "zeros", "another kind", "a bit", "gone", *HEADERS])
def test_damage_is_told(model: Model, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is damaged is not taken, is said by name when it is come upon, and is written anew."""
    plain, _ = say(Engine(model, prefix_cache=False))
    engine, _ = engine_of(model, tmp_path)
    say(engine)
    rest(engine)
    again, shelf = engine_of(model, tmp_path)
    files = sorted(tmp_path.iterdir())
    for path in files:
        raw = path.read_bytes()
        path.unlink()
        if how != "gone":
            path.write_bytes(damaged(raw, how))
    for whole in range(1 if how == "gone" else 3):  # one is come upon when those before it are whole
        caplog.clear()
        with caplog.at_level(logging.WARNING, "slipstream.kvcache.shelf"):
            assert say(again) == (plain, BLOCK_SLOTS * whole)
        (said,) = caplog.messages
        assert "is damaged and is computed again" in said
        assert any(str(path) in said for path in files)
        assert shelf.damaged == 1
        assert shelf.stopped is None
        rest(again)
        again, shelf = engine_of(model, tmp_path)


class Full:
    """A disk with room for so many files more; what is written to it then fails as the system says."""

    def __init__(self, room: int):
        self.room = room

    def open(self, descriptor: int, mode: str) -> BinaryIO:
        if self.room > 0:
            self.room -= 1
            return open(descriptor, mode)  # type: ignore[return-value]
        os.close(descriptor)
        return open("/dev/full", mode)  # type: ignore[return-value]


@pytest.mark.parametrize("room", [0, 1, 4])
def test_a_full_disk_ends_storing_and_not_serving(
    model: Model, tmp_path: Path, room: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = say(Engine(model, prefix_cache=False))
    engine, shelf = engine_of(model, tmp_path)
    monkeypatch.setattr("slipstream.kvcache.shelf.open", Full(room).open, raising=False)
    with caplog.at_level(logging.WARNING, "slipstream.kvcache.shelf"):
        assert say(engine) == (plain, 0)
        rest(engine)
        assert say(engine) == (plain, 288), "from the cache itself"
        assert say(engine, [*PROMPT[::-1]])[1] == 0
        rest(engine)
    (warning,) = caplog.messages
    assert "no longer written, serving goes on" in warning
    assert "No space left on device" in warning
    assert shelf.stopped is not None
    assert len(shelf) == len(list(tmp_path.iterdir())) == room, "and nothing of what did not fit is left"
    monkeypatch.undo()
    again, _ = engine_of(model, tmp_path)
    assert say(again) == (plain, BLOCK_SLOTS * room), "what was stored before is still good"


def test_nothing_that_fails_ends_serving(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that can be neither written to nor tidied up any more."""
    plain, _ = say(Engine(model, prefix_cache=False))
    engine, shelf = engine_of(model, tmp_path)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("os.open", "os.replace", "os.utime", "os.unlink"):
        monkeypatch.setattr(name, refused)
    assert say(engine) == (plain, 0)
    rest(engine)
    assert "Permission denied" in str(shelf.stopped)
    assert say(engine) == (plain, 288)


def test_other_weights_find_nothing(model: Model, tmp_path: Path) -> None:
    engine, _ = engine_of(model, tmp_path)
    say(engine)
    rest(engine)
    shelf = Shelf(tmp_path, 1 << 30, model.executable.operands.cache.block_bytes, "others")  # type: ignore[attr-defined]
    other = Engine(model)
    other.keep_blocks(shelf)
    assert say(other)[1] == 0


@pytest.mark.parametrize("what", ["__version__", "build", "LAYOUT", "instruction_set", "ACTIVATION_RULE"])
def test_other_numerics_find_nothing(model: Model, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever decides the bits is in the name under which blocks are looked for after a restart."""
    assert model.namespace.numerics == model.executable.numerics
    engine, _ = engine_of(model, tmp_path)
    said, _ = say(engine)
    rest(engine)
    with monkeypatch.context() as patch:
        another = "another" if what.isupper() or what.startswith("_") else lambda: "another"
        patch.setattr(f"slipstream.kernels.native.executable.{what}", another)
        assert "another" in model.executable.numerics
        assert model.namespace.numerics == model.executable.numerics
        assert say(engine_of(model, tmp_path)[0]) == (said, 0)
    assert say(engine_of(model, tmp_path)[0]) == (said, 288)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.features("prefix store", "prefix cache", "giving way", "sampling")
def test_company_small_caches_and_restarts_change_nothing(tiny_gguf: Path, tmp_path: Path, seed: int) -> None:
    """Many requests that begin alike, in a cache that holds a few of them, with restarts in between."""
    rng = random.Random(seed)
    block = load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1)).cache.bytes_per_block
    model = load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1, cache_bytes=24 * block, spare_bytes=0))
    beginnings = [[rng.randrange(256) for _ in range(rng.choice([64, 100, 200]))] for _ in range(3)]
    for _ in range(4):
        engine, _ = engine_of(model, tmp_path, 60 * (block + 400))
        wanted = [[*rng.choice(beginnings), *(rng.randrange(256) for _ in range(rng.randint(1, 40)))] for _ in range(6)]
        numbers = {engine.add(prompt, PARAMS): prompt for prompt in wanted}
        chunks: dict[int, list[object]] = {number: [] for number in numbers}
        while engine.busy:
            for chunk in engine.step():
                chunks[chunk.request].append(chunk)
            engine.check()
        rest(engine)  # before another engine writes over what this one holds
        for number, prompt in numbers.items():
            alone = Engine(model, prefix_cache=False)
            assert collect(chunks[number])[0] == collect(alone.run(alone.add(prompt, PARAMS)))[0]  # type: ignore[arg-type]


def test_the_options_value() -> None:
    assert parse_store("folder") == (Path("folder"), 8 << 30)
    assert parse_store("a/b,gb=0.5") == (Path("a/b"), 500_000_000)
    for bad in ("", ",gb=1", "a,gb=0", "a,gb=x", "a,mb=4"):
        with pytest.raises(UsageError, match="--prefix-store"):
            parse_store(bad)


def test_nothing_is_read_into_blocks_that_a_step_may_still_write(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer has ended, but a step planned ahead has a row of it: who gets its blocks waits for that step."""
    first, _ = engine_of(model, tmp_path)
    expected, _ = say(first)
    rest(first)
    submit, collect_one, wait = NativeExecutable.submit, NativeExecutable.collect, NativeExecutable.wait
    late: list[tuple[Rows, DrawColumns | None]] = []

    def run(executable: NativeExecutable, count: int) -> None:
        for step in late[:count]:
            submit(executable, *step)
        del late[:count]

    def collect_late(executable: NativeExecutable) -> StepOutput:
        run(executable, 0 if executable._flights else 1)
        return collect_one(executable)

    def wait_late(executable: NativeExecutable) -> None:
        run(executable, len(late))
        wait(executable)

    # A step runs as late as it can: when it is waited for.
    monkeypatch.setattr(NativeExecutable, "submit", lambda executable, *step: late.append(step))
    monkeypatch.setattr(NativeExecutable, "collect", collect_late)
    monkeypatch.setattr(NativeExecutable, "wait", wait_late)
    stops = SamplingParams(temperature=1.0, seed=1, max_tokens=200, stop_token_ids=tuple(range(0, 250, 9)))
    read = 0
    for length in range(33, 60):
        engine, _ = engine_of(replace(model, blocks=12), tmp_path)
        engine.ahead = True
        engine.add([7] * length, stops)
        number = engine.add(PROMPT, PARAMS)
        said = collect(chunk for chunk in engine.run(number) if chunk.request == number)[0]
        assert said == expected, length
        read += engine.timings[number].cached_tokens
    assert read > 27 * 200
