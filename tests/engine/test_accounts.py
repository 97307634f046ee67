"""The engine's accounts: seconds add up to the wall clock, work is counted, and a known loss is found."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.engine import Engine, LoadOptions, Model, load_model
from slipstream.engine.accounts import StepAccounts
from slipstream.engine.cost import cost_model, decode_step, fit_cost
from slipstream.engine.drafters import Speculative, load_speculative
from slipstream.engine.explain import Load, explain, explain_finished, native_executable
from slipstream.engine.flight import Flight
from slipstream.engine.foresight import foresee
from slipstream.errors import UsageError
from slipstream.kernels.backend import StepOutput, StepSeconds
from slipstream.kernels.native import NativeExecutable, _native
from slipstream.program import CacheGroup, CacheSpec, GroupKind, KVFormat, Rows, SpanShape, StepShape
from slipstream.program.op_classes import OP_CLASSES
from slipstream.program.sampling import Draw, DrawColumns, SamplingParams
from slipstream.roofline.accounting import ShiftedSpans
from slipstream.roofline.counters import count_bytes
from slipstream.roofline.probe import Figure, Probe
from slipstream.scheduling import Plan, State, schedule
from tests.speculation.folders import dspark_folder, eagle3_folder

PROMPT = list(range(40))
PARAMS = SamplingParams(temperature=0.7, seed=1, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Model:
    return load_model(str(tiny_gguf), LoadOptions(max_rows=64))


def test_classes_are_those_of_the_kernels() -> None:
    assert tuple(_native.op_classes()) == OP_CLASSES


def test_seconds_add_up_and_work_is_counted(model: Model) -> None:
    engine = Engine(model)
    number = engine.add(PROMPT, PARAMS)
    begun = time.perf_counter()
    while engine.busy:
        engine.step()
    wall = time.perf_counter() - begun
    accounts = engine.accounting
    records = list(accounts.records)
    assert len(records) == accounts.totals.steps == 60
    marked = sum(r.seconds + r.outside + r.idle + r.accounting for r in records)
    ends = [r.begun + r.kernels for r in records]
    apart = [r.begun + r.kernels - before for before, r in zip(ends, records[1:], strict=False)]
    each = [r.seconds + r.outside + r.idle + r.accounting for r in records[1:]]
    assert apart == pytest.approx(each, abs=1e-6), "every second between two steps' ends is somewhere"
    assert 0.5 * wall < marked <= wall
    assert all(r.classes.sum() <= r.kernels for r in records)
    assert all(r.accounting > 0 for r in records[1:])
    assert accounts.totals.rows == {"prefill": 40, "decode": 59}
    assert accounts.totals.tokens == 60
    program = native_executable(model).program
    weights = sum(u.shape[0] * u.shape[1] for u in program.weights.values() if u.role == "matrix")
    head = model.config.vocabulary * model.config.hidden
    body = weights - head
    operations = accounts.operations_by_class()
    assert operations["logits"] == 2 * 60 * head
    assert sum(operations.values()) - operations["logits"] - operations["attention"] == 2 * 99 * body
    assert sum(native_executable(model).class_bytes.values()) == native_executable(model).weight_bytes
    assert accounts.bytes_by_class()["logits"] == 60 * native_executable(model).class_bytes["logits"]
    assert engine.timings[number].generated == 60


class Clock:
    """time.perf_counter, advanced by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_marks_between_and_inside_steps(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step after the other: everything between two steps' kernels is on the way."""
    clock = Clock()
    monkeypatch.setattr("slipstream.engine.accounts.time.perf_counter", clock)
    accounts = StepAccounts(model, None)

    def step(before: float, busy: bool = True, wake: float | None = None, exclude: float = 0.0) -> None:
        if wake is not None:
            clock.now += wake
            accounts.woken()
        accounts.exclude(exclude)
        clock.now += before
        begun = clock.now
        planned, kernels, ran = begun + 1.0, begun + 1.5, begun + 3.5
        clock.now = ran + 4.0
        accounts.end(flight(begun, planned, seconds(kernels, 2.0)), (), ran, busy)

    step(before=9.0)
    step(before=0.5)
    step(before=0.25, busy=False)
    step(before=0.125, wake=8.0)
    step(before=3.0, exclude=2.5)
    first, *records = accounts.accounting.records
    assert (first.idle, first.outside, first.output, first.scheduling) == (0.0, 0.0, 0.0, 1.0)
    assert [r.outside for r in records] == [0.5, 0.25, 0.125, 0.5]
    assert [r.idle for r in records] == [0.0, 0.0, 8.0, 0.0]
    assert {(r.scheduling, r.dispatch, r.output, r.kernels) for r in records} == {(1.0, 0.5, 4.0, 2.0)}
    assert accounts.accounting.totals.idle == 8.0
    assert accounts.accounting.totals.hidden == 4.0, "what followed the last step is not on anybody's way"


def test_marks_of_steps_planned_ahead(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host does while kernels run is hidden; only what makes them wait counts."""
    clock = Clock()
    monkeypatch.setattr("slipstream.engine.accounts.time.perf_counter", clock)
    accounts = StepAccounts(model, None)

    def land(plan: tuple[float, float], kernels: tuple[float, float], output: tuple[float, float]) -> None:
        clock.now = output[1]
        begun, ended = kernels
        accounts.end(flight(*plan, seconds(begun, ended - begun)), (), output[0], True)

    # The second step is planned while the first runs; the third's plan is late by one second.
    land((0.0, 1.0), (1.0, 11.0), (11.5, 13.0))
    land((2.0, 3.0), (11.0, 21.0), (24.0, 25.0))
    land((13.0, 22.0), (22.5, 30.0), (30.0, 31.0))
    first, second, third = accounts.accounting.records
    assert second.seconds == second.kernels == 10.0
    assert second.hidden == pytest.approx(1.0 + 1.0)
    assert (third.scheduling, third.dispatch) == (1.0, 0.5)
    assert third.outside == third.idle == third.output == 0.0
    assert first.begun + first.kernels + second.seconds + third.seconds == third.begun + third.kernels


def flight(begun: float, planned: float, seconds: np.ndarray) -> Flight:
    return Flight([], [], [], Rows.of([], []), None, begun, {}, planned, StepOutput(seconds=seconds))


def seconds(begun: float, total: float) -> np.ndarray:
    """A backend's seconds of a step."""
    values = np.zeros(len(OP_CLASSES) + 3)
    values[-3:] = total, 0.0, begun
    return values


def test_records_wait_until_they_are_wanted(model: Model) -> None:
    engine = Engine(model)
    engine.add(PROMPT, PARAMS)
    for _ in range(StepAccounts.FOLD + 3):
        if engine.busy:
            engine.step()
    assert engine.accounting.totals.steps == 60


def test_repeated_steps_are_accounted_for_like_planned_ones(model: Model) -> None:
    """A step that keeps the last plan is written down in short; it must come to the same."""

    def unlike(state: State) -> Plan:
        return schedule(state)

    accounts = []
    for planner in (schedule, unlike):
        engine = Engine(model, planner=planner, ahead=False)
        for index in range(3):
            engine.add(PROMPT[: 20 + index], replace(PARAMS, seed=index))
        while engine.busy:
            engine.step()
        accounts.append(engine.accounting)
    short, long = accounts
    assert any(isinstance(r.spans, ShiftedSpans) for r in short.records)
    assert not any(isinstance(r.spans, ShiftedSpans) for r in long.records)
    assert [(tuple(r.spans), r.shape) for r in short.records] == [(tuple(r.spans), r.shape) for r in long.records]
    assert (short.totals.rows, short.totals.tokens) == (long.totals.rows, long.totals.tokens)


def test_the_shape_of_decodes() -> None:
    full = CacheGroup(GroupKind.FULL, 3, 2, 64, 64, KVFormat.BF16)
    cache = CacheSpec((full, replace(full, kind=GroupKind.WINDOW, window=16, layers=2)))
    positions = np.array([3, 15, 16, 40])
    spans = [SpanShape(p, 1, 1) for p in positions.tolist()]
    assert StepShape.of_decodes(positions, cache) == StepShape.of_spans(spans, cache)


def test_backends_without_a_clock_of_their_own(tiny_gguf: Path) -> None:
    reference = load_model(str(tiny_gguf), LoadOptions(backend="reference", max_rows=64))
    engine = Engine(reference)
    number = engine.add(PROMPT[:4], replace(PARAMS, max_tokens=3))
    list(engine.run(number))
    assert all(r.kernels > 0 and not r.classes.any() for r in engine.accounting.records)
    with pytest.raises(UsageError, match="native"):
        fit_cost(reference)
    with pytest.raises(UsageError, match="native"):
        native_executable(reference)


@pytest.mark.parametrize("op_class", ["qkv", "sample", "attention", "logits"])
def test_a_delay_is_found_in_its_class(model: Model, op_class: str) -> None:
    """Compared step by step in turns: its class grows by at least what was injected, and by more than any other."""
    executable = native_executable(model)
    rows = decode_step(model, 1, 40)
    draws = DrawColumns.of([Draw(PARAMS, 0, 0, 41)])
    each = 2e-3
    layers = model.config.layers if op_class in ("qkv", "attention") else 1
    index = OP_CLASSES.index(op_class)
    differences = []
    for _ in range(9):
        executable.executor.set_delay(op_class, 0.0)
        plain = executable.step(rows, draws).seconds
        executable.executor.set_delay(op_class, each)
        delayed = executable.step(rows, draws).seconds
        differences.append(StepSeconds.of(delayed - plain).classes)
    executable.executor.set_delay(op_class, 0.0)
    grown = np.median(differences, 0)
    assert grown[index] >= 0.95 * each * layers
    assert int(grown.argmax()) == index


def test_running_a_step_again_changes_nothing(model: Model) -> None:
    """What the explanation of missing threads rests on."""
    engine, other = Engine(model), native_executable(model).with_threads(1)
    number = engine.add(PROMPT, PARAMS)
    alone = Engine(model)
    expected = "".join(chunk.text for chunk in alone.run(alone.add(PROMPT, PARAMS)))
    text = ""
    while engine.busy:
        text += "".join(chunk.text for chunk in engine.step() if chunk.request == number)
        assert engine.last_step is not None
        other.step(*engine.last_step)
    assert text == expected


def test_explain_a_generation(model: Model) -> None:
    engine = Engine(model, fit_cost(model))
    result = explain(engine, PROMPT, PARAMS, Load(others=1, foreign_prompt=20))
    waterfall = result.waterfall
    assert sum(part.seconds for part in waterfall.parts) == pytest.approx(waterfall.seconds)
    assert waterfall["other decodes"] > 0
    assert waterfall["foreign prefill"] > 0
    assert waterfall.tokens == 59
    assert not engine.busy
    engine.check()
    with pytest.raises(UsageError, match="longer"):
        explain(engine, PROMPT, replace(PARAMS, max_tokens=3))
    with pytest.raises(UsageError, match="cost model"):
        explain(Engine(model), PROMPT, PARAMS)


def test_a_slow_planner_is_blamed(model: Model) -> None:
    def slow(state: State) -> Plan:
        time.sleep(0.003)
        return schedule(state)

    cost = fit_cost(model)
    plain = explain(Engine(model, cost), PROMPT, PARAMS).waterfall
    hurt = explain(Engine(model, cost, slow), PROMPT, PARAMS).waterfall
    assert hurt.largest.name == "scheduling"
    assert hurt["scheduling"] - plain["scheduling"] > 0.0028


def test_explain_afterwards(model: Model) -> None:
    engine = Engine(model, fit_cost(model))
    number = engine.add(PROMPT, PARAMS)
    list(engine.run(number))
    waterfall = explain_finished(engine, number)
    assert waterfall is not None
    assert waterfall.tokens >= 58
    short = engine.add(PROMPT, replace(PARAMS, max_tokens=3))
    list(engine.run(short))
    assert explain_finished(engine, short) is None


def test_cost_models_are_kept(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    first = cost_model(model)
    assert cost_model(model) == first
    (file,) = (tmp_path / "cache" / "cost").iterdir()
    for damage in ("{", "{}", '{"body": {"counts": [1], "seconds": [1]}}', "[]"):
        file.write_text(damage)
        assert cost_model(model).seconds(StepShape(1, 1, 100, 10)) > 0


def test_foresight(tiny_gguf: Path, model: Model) -> None:
    rate = Figure(10e9, 10e9, 10e9)
    probe = Probe("", "made up", 2, 1 << 34, {}, {2: rate}, rate, {}, {"avx512": {"int8": Figure(1e12, 1e12, 1e12)}})
    result = foresee(tiny_gguf, LoadOptions(max_rows=model.max_rows), 100, Speculative.parse("auto"), probe)
    assert result.cache_bytes == model.kv_bytes
    assert result.weight_bytes == native_executable(model).stored_bytes
    assert result.buffer_bytes == pytest.approx(model.buffer_bytes, rel=0.25)
    assert f"up to {result.buffer_bytes / 1e6:.0f} MB of buffers" in result.lines()[0]
    assert result.fits
    assert "weights" in result.bottleneck()
    assert len(result.lines()) == 3
    step = result.weight_bytes + 100 * model.cache.bytes_per_token
    assert result.ceiling.tok_s == pytest.approx(10e9 / step, rel=0.01)


@pytest.mark.parametrize("kind", ["draft", "eagle3", "dspark"])
def test_what_a_drafter_will_hold(tiny_gguf: Path, tmp_path: Path, kind: str) -> None:
    """Known before anything is loaded, about."""
    if kind == "draft":
        said = f"draft:{tiny_gguf}"
    else:
        said = str((eagle3_folder if kind == "eagle3" else dspark_folder)(tmp_path / kind))
    wanted, options = Speculative.parse(said), LoadOptions()
    _, controller = load_speculative(str(tiny_gguf), options, wanted)
    assert controller is not None
    assert controller.neural is not None
    held = controller.neural.held_bytes
    rate = Figure(10e9, 10e9, 10e9)
    probe = Probe("", "made up", 2, 1 << 34, {}, {2: rate}, rate, {}, {"avx512": {"int8": Figure(1e12, 1e12, 1e12)}})
    result = foresee(tiny_gguf, options, 100, wanted, probe)
    assert 0.5 * held < result.drafter_bytes < 1.5 * held
    assert result.total_bytes == sum(
        (result.weight_bytes, result.cache_bytes, result.drafter_bytes, result.buffer_bytes)
    )
    assert f"{result.drafter_bytes / 1e6:.0f} MB for the drafter" in result.lines()[0]


def test_counters_count_or_say_why_not() -> None:
    data = np.zeros(1 << 22)
    count = count_bytes(lambda: data.fill(1.0))
    assert (count.nbytes is None) == bool(count.reason)


def test_a_fit_leaves_no_memory_behind(tiny_gguf: Path) -> None:
    """The blocks that its steps wrote are the system's again, and read as zeros."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    model = load_model(str(tiny_gguf), LoadOptions(max_len=512, sequences=600, threads=1))
    executable = model.executable
    assert isinstance(executable, NativeExecutable)
    size = model.blocks * model.cache.bytes_per_block
    assert size > 60e6
    gc.collect()  # what other tests left would go in between
    before = resident()
    executable.touch_blocks(np.arange(model.blocks, dtype=np.int32))
    assert resident() - before > 0.9 * size
    fit_cost(model, quick=True)
    assert resident() - before < 0.3 * size
    assert not executable.operands.cache.data.any()
