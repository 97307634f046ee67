"""The cost model: recovers a made-up machine from noisy steps, follows it when it changes, and never runs wild."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.program import StepShape
from slipstream.roofline.cost import CostModel, Curve, Observation, OnlineCost, fit

BYTES_PER_TOKEN = 20_000
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def body(rows: int) -> float:
    """Bound by memory up to 8 rows, then 1 ms a row."""
    return max(8e-3, rows * 1e-3) + 0.02e-3 * rows


def machine(shape: StepShape, slower: float = 1.0) -> Observation:
    head = max(2e-3, shape.logit_rows * 0.3e-3) if shape.logit_rows else 0.0
    attention = 0.2e-3 + 0.02e-3 * shape.rows + 0.5e-6 * shape.row_context + 1e-11 * shape.kv_bytes
    return Observation(shape, slower * body(shape.rows), slower * head, slower * attention, 0.1e-3)


def decode(rows: int, context: int) -> StepShape:
    return StepShape(rows, rows, rows * context * BYTES_PER_TOKEN, rows * context)


def chunk(rows: int, context: int) -> StepShape:
    seen = rows * context + rows * (rows + 1) // 2
    return StepShape(rows, 1, (context + rows) * BYTES_PER_TOKEN, seen)


def shapes() -> list[StepShape]:
    found = [decode(n, c) for n in COUNTS if n <= 32 for c in (32, 1000, 2000)]
    return found + [chunk(n, c) for n in COUNTS if n >= 8 for c in (0, 2000)]


def noisy(shape: StepShape, rng: random.Random, slower: float = 1.0) -> Observation:
    """A step on a shared machine: a few percent up and down, and now and then three times as long."""
    factor = rng.uniform(0.95, 1.1) * (3.0 if rng.random() < 0.1 else 1.0) * slower
    return machine(shape, factor)


def errors(model: CostModel, rng: random.Random, slower: float = 1.0) -> list[float]:
    held_out = [decode(rng.randint(1, 20), rng.randint(100, 4000)) for _ in range(40)]
    held_out += [chunk(rng.randint(8, 500), rng.randint(0, 2000)) for _ in range(20)]
    return [abs(model.seconds(s) / machine(s, slower).seconds - 1) for s in held_out]


@pytest.mark.parametrize("seed", range(5))
def test_held_out_shapes(seed: int) -> None:
    rng = random.Random(seed)
    model = fit([noisy(shape, rng) for shape in shapes() for _ in range(5)])
    assert statistics.median(errors(model, rng)) < 0.08, "steps are 2.5 % slower than the machine at the median"


def test_the_knee() -> None:
    # A row costs 0.02 ms up to 8 rows and 1.02 ms past them; half of its share at 512 rows is 0.51 ms.
    assert fit([machine(shape) for shape in shapes()]).knee == 8
    flat = CostModel(Curve((1, 2), (1.0, 1.0)), Curve((1, 2), (1.0, 1.0)), (0, 0, 0, 0))
    assert flat.knee is None


def test_marginal_costs() -> None:
    model = fit([machine(shape) for shape in shapes()])
    assert model.marginal_row(2) == pytest.approx(0.04e-3, rel=0.05)
    assert model.marginal_row(64) == pytest.approx(1.04e-3, rel=0.05)
    assert model.marginal_logit_row(16) == pytest.approx(0.3e-3, rel=0.05)
    assert model.marginal_kv_token(BYTES_PER_TOKEN) == pytest.approx(0.5e-6 + 0.2e-6, rel=0.05)


def test_it_follows_a_machine_that_slows_down() -> None:
    rng = random.Random(3)
    online = OnlineCost(fit([machine(shape) for shape in shapes()]))
    assert statistics.median(errors(online.model, rng, 1.5)) > 0.3
    for _ in range(400):
        online.observe(noisy(decode(rng.randint(1, 16), rng.randint(100, 2000)), rng, 1.5))
    assert statistics.median(errors(online.model, rng, 1.5)) < 0.1
    assert online.model.pace == pytest.approx(1.5, rel=0.1)


def test_one_disturbed_step_moves_little() -> None:
    online = OnlineCost(fit([machine(shape) for shape in shapes()]))
    shape = decode(4, 500)
    before = online.model.seconds(shape)
    online.observe(machine(shape, slower=1000.0))
    assert online.model.seconds(shape) < 1.02 * before


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(0, 5000), st.floats(1e-6, 10)), max_size=40))
def test_whatever_happens_costs_stay_positive_and_rise_with_rows(steps: list[tuple[int, int, float]]) -> None:
    online = OnlineCost(fit([machine(shape) for shape in shapes()]))
    for rows, context, slower in steps:
        online.observe(machine(decode(rows, context), slower))
    seconds = [online.model.seconds(decode(n, 100)) for n in (1, 2, 3, 7, 8, 50, 512, 700)]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert all(online.model.marginal_row(n) >= 0 for n in (1, 5, 300))


def test_a_snapshot_does_not_change() -> None:
    online = OnlineCost(fit([machine(shape) for shape in shapes()]))
    snapshot = online.model
    before = snapshot.seconds(decode(1, 1))
    online.observe(machine(decode(1, 1), 2.0))
    assert snapshot.seconds(decode(1, 1)) == before
    assert online.model.seconds(decode(1, 1)) > before


def test_nothing_to_fit_to() -> None:
    with pytest.raises(ValueError, match="needs steps"):
        fit([])


def test_extra_rows_are_what_two_steps_differ_by() -> None:
    model = fit([machine(shape) for shape in shapes()])
    base = StepShape(3, 3, 5000, 900)
    extra = model.extra_rows(base, 300)
    for more in (1, 2, 7, 20):
        larger = StepShape(3 + more, 3 + more, 5000, 900 + 300 * more)
        assert extra(more) == pytest.approx(model.seconds(larger) - model.seconds(base))
    json.dumps(asdict(model))  # it is kept in files: what is remembered of it is no part of it
