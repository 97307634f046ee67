"""Planning the next step while one runs: the same tokens, the scheduler called in time, nothing lost at the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from slipstream.engine import Chunk, Engine, LoadOptions, Model, load_model
from slipstream.engine.cost import fit_cost
from slipstream.kernels import Executable
from slipstream.kernels.native import NativeExecutable
from slipstream.program import Row, Rows, sampled
from slipstream.program.sampling import Draw, DrawColumns, SamplingParams
from slipstream.scheduling import Plan, State, schedule

BACKENDS = ["native", "reference", "torch"]


def loaded(path: Path, backend: str) -> Model:
    return load_model(str(path), LoadOptions(backend=backend, max_rows=64))


def draws(position: int) -> DrawColumns:
    return DrawColumns.of([Draw(SamplingParams(temperature=0.9, logprobs=2), 5, 0, position)])


def row(token: int, position: int) -> Rows:
    return Rows.of([Row(0, token, position, position, -1, True)], [[0]])


def one_by_one(executable: Executable, count: int) -> list[int]:
    tokens = [7]
    for position in range(count):
        output = executable.step(row(tokens[-1], position), draws(position + 1))
        assert output.drawn is not None
        tokens.append(int(output.drawn.token[0]))
    return tokens


@pytest.mark.parametrize("backend", BACKENDS)
def test_submitted_steps_read_what_the_last_one_drew(tiny_gguf: Path, backend: str) -> None:
    executable = loaded(tiny_gguf, backend).executable
    wanted = one_by_one(executable, 20)
    executable.submit(first := row(7, 0), draws(1))
    tokens, rows = [7], [first]
    for position in range(1, 20):
        rows.append(row(sampled(0), position))
        executable.submit(rows[-1], draws(position + 1))
        drawn = executable.collect().drawn
        assert drawn is not None
        tokens.append(int(drawn.token[0]))
    executable.wait()
    drawn = executable.collect().drawn
    assert drawn is not None
    assert [*tokens, int(drawn.token[0])] == wanted
    assert [int(r.token[0]) for r in rows] == wanted[:-1], "rows are filled in, so that a step can be run again"


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_are_copied_between_steps(tiny_gguf: Path, backend: str) -> None:
    """A copy that is asked for while a step runs sees what it wrote, and not what the next one writes."""
    executable = loaded(tiny_gguf, backend).executable
    wanted = one_by_one(executable, 3)
    for position in range(2):
        executable.submit(row(wanted[position], position), draws(position + 1))
    executable.copy_blocks(np.array([[0, 9]], np.int32))
    executable.submit(row(3, 0), draws(1))  # writes over the first token
    at_copy = Rows.of([Row(0, wanted[2], 2, 9 * 32 + 2, -1, True)], [[9]])
    executable.submit(at_copy, draws(3))
    last = [executable.collect() for _ in range(4)][-1].drawn
    assert last is not None
    assert int(last.token[0]) == wanted[3]


def test_who_has_waited_finds_blocks_copied(tiny_gguf: Path) -> None:
    """The copies that were asked for while a step ran are made too: what was copied from may be written over."""
    executable = loaded(tiny_gguf, "native").executable
    assert isinstance(executable, NativeExecutable)
    blocks = executable.operands.cache.data.reshape(-1, executable.operands.cache.block_bytes)
    executable.submit(row(1, 0), draws(1))
    executable.copy_blocks(np.array([[0, 9]], np.int32))
    executable.wait()
    assert blocks[0].any()
    assert np.array_equal(blocks[0], blocks[9])
    executable.collect()


def test_bad_steps_are_reported_when_they_are_collected(tiny_gguf: Path) -> None:
    executable = loaded(tiny_gguf, "native").executable
    executable.submit(row(sampled(0), 0), draws(1))
    with pytest.raises(RuntimeError, match="did not draw"):
        executable.collect()
    executable.submit(row(1, 0), draws(1))
    executable.submit(row(sampled(1), 1), draws(2))
    assert executable.collect().drawn is not None
    with pytest.raises(RuntimeError, match="did not draw"):
        executable.collect()
    executable.submit(row(1, 0), draws(1))
    assert executable.collect().drawn is not None, "the next one runs"
    with pytest.raises(IndexError):
        executable.collect()
    with pytest.raises(RuntimeError, match="outside the cache"):
        executable.copy_blocks(np.array([[0, 1 << 20]], np.int32))


def test_columns_resolve_only_what_was_drawn() -> None:
    rows = row(sampled(1), 0)
    with pytest.raises(ValueError, match="did not draw"):
        rows.resolve([4])
    rows.resolve([4, 6])
    assert rows.token.tolist() == [6]


def said(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[list[Chunk]]:
    numbers = [engine.add(*request) for request in requests]
    chunks: list[Chunk] = []
    while engine.busy:
        chunks += engine.step()
        engine.check()
    return [[c for c in chunks if c.request == number] for number in numbers]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_answers(tiny_gguf: Path, backend: str) -> None:
    model = loaded(tiny_gguf, backend)
    text = "".join(c.text for c in said(Engine(model), [([1, 2], SamplingParams(seed=0, max_tokens=20))])[0])
    requests = [
        (list(range(70)), SamplingParams(seed=1, max_tokens=40, ignore_eos=True, logprobs=1)),
        ([1, 2], SamplingParams(seed=0, max_tokens=20, stop=(text[5:8],))),
        ([5] * 40, SamplingParams(seed=2, max_tokens=20, min_tokens=5, stop_token_ids=tuple(range(0, 200, 3)))),
        ([6] * 33, SamplingParams(seed=3, max_tokens=20, frequency_penalty=1.0, n=3)),
    ]
    for chosen in (requests, requests[:3], requests[:1]):
        for left, right in zip(*(said(Engine(model, ahead=a), chosen) for a in (False, True)), strict=True):
            by_choice = [[replace(c, request=0) for c in sorted(x, key=lambda c: c.choice)] for x in (left, right)]
            assert by_choice[0] == by_choice[1]


def test_the_next_step_is_planned_while_one_runs(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(tiny_gguf, "native")
    events: list[str] = []

    def planner(state: State) -> Plan:
        events.append("plan")
        return schedule(state)

    for name in ("submit", "collect"):
        inner = getattr(NativeExecutable, name)

        def noted(self: NativeExecutable, *arguments: object, name: str = name, inner: object = inner) -> object:
            events.append(name)
            return inner(self, *arguments)  # type: ignore[operator]

        monkeypatch.setattr(NativeExecutable, name, noted)
    said(Engine(model, planner=planner, ahead=True), [([1, 2], SamplingParams(max_tokens=4, ignore_eos=True))])
    one = ["plan", "submit"]
    assert events == [*one, *one, "collect", *one, "collect", *one, "collect", "plan", "collect"]
    assert Engine(model).ahead is False, "all cores run kernels"


def test_penalties_wait_for_the_last_token(tiny_gguf: Path) -> None:
    model = loaded(tiny_gguf, "native")
    engine = Engine(model, ahead=True)
    engine.add([1, 2], SamplingParams(max_tokens=30, ignore_eos=True, presence_penalty=1.0))
    for _ in range(5):
        engine.step()
        assert engine.seconds_left() == 0.0, "nothing is under way"


def test_how_long_a_step_still_runs(tiny_gguf: Path) -> None:
    model = loaded(tiny_gguf, "native")
    engine = Engine(model, fit_cost(model), ahead=True)
    assert engine.seconds_left() == 0.0
    engine.add([1, 2], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    assert engine.cost is not None
    assert 0.0 <= engine.seconds_left() < 1.0
    engine.settle()
    while engine.busy:
        engine.step()
    assert engine.seconds_left() == 0.0


def test_what_was_drawn_for_nobody_is_not_counted(tiny_gguf: Path) -> None:
    """A sequence that stops by itself has a row too many under way."""
    model = loaded(tiny_gguf, "native")
    engine = Engine(model, ahead=True)
    chunks = said(engine, [([1, 2], SamplingParams(max_tokens=9, stop_token_ids=tuple(range(256))))])[0]
    assert len(chunks) == 1
    totals = engine.accounting.totals
    assert (totals.steps, totals.tokens) == (2, 1)
