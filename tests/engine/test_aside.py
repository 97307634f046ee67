"""What is computed beside answers: as much at a time as readers can bear, in turns, and never at anybody's expense."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.engine import Engine, LoadOptions, Model, load_model
from slipstream.engine.aside import bearable_rows
from slipstream.engine.embedding import Embedder
from slipstream.engine.scoring import Scorer
from slipstream.program import BLOCK_SLOTS, StepShape
from slipstream.program.sampling import SamplingParams
from slipstream.roofline.cost import CostModel, Curve
from slipstream.scheduling import Limits
from slipstream.scheduling.scheduler import BEARABLE, LEAST_CHUNK
from tests.scheduling.test_scheduler import COST

ROW, STEP = 1e-3, 5e-3
PRICED = CostModel(Curve((1, 101), (STEP, STEP + 100 * ROW)), Curve((1, 2), (0.0, 0.0)), (0.0,) * 4)
"""A step takes 5 ms and another one for each further row."""
ANSWER = StepShape(1, 1, 0, 1)


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Model:
    return load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1))


@pytest.mark.parametrize(
    ("cost", "target", "most", "rows"),
    [
        (PRICED, None, 256, round((BEARABLE - 2 * STEP) / ROW) + 1),
        (PRICED, None, 30, 30),
        (PRICED, None, 1, 1),
        (PRICED, 20e-3, 256, 11),
        (PRICED, STEP, 256, LEAST_CHUNK),
        (replace(PRICED, pace=10.0), None, 256, LEAST_CHUNK),
        (replace(PRICED, attention=(0.0, 0.0, 0.0, 1e-9)), None, 256, 36),
    ],
)
def test_a_chunk_is_as_large_as_readers_can_bear(cost: CostModel, target: float | None, most: int, rows: int) -> None:
    found = bearable_rows(cost, ANSWER, target, most, StepShape(1, 0, 5_000_000, 1))
    assert found == rows
    if LEAST_CHUNK < found < most:
        limit = target or max(BEARABLE, 2 * cost.seconds(ANSWER))
        took = [cost.seconds(StepShape(n, 0, 5_000_000, n)) + cost.seconds(ANSWER) for n in (found, found + 1)]
        assert took[0] <= limit < took[1]


def test_nobody_who_reads_no_price(model: Model) -> None:
    engine = Engine(model, COST, limits=Limits(64, tpot_target=1e-9), ahead=False)
    embedder = Embedder(engine)
    embedder.add(1, [[7] * 120], "mean", normalize=True)
    rows = list[int]()
    executable_rows = embedder._rows
    embedder._rows = lambda start, left: rows.append(executable_rows(start, left)) or rows[-1]  # type: ignore
    embedder.step()
    engine.add([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    embedder.step()
    assert rows == [64, LEAST_CHUNK]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_the_same_whatever_the_chunks(model: Model, pooling: str) -> None:
    texts = [[n * 7 % 251 for n in range(length)] for length in (1, 2, 33, 150)]
    found = []
    for most in (64, 7, 2, 1):
        embedder = Embedder(Engine(model))
        embedder.most_rows = most
        embedder.add(1, texts, pooling, normalize=False)
        while (done := embedder.step()) is None:
            pass
        found.append(done[1])
    assert all(vectors == found[0] for vectors in found)


def test_tenants_take_turns(model: Model) -> None:
    scorer = Scorer(Engine(model))
    for number, (tenant, count) in enumerate((("many", 6), ("many", 2), ("one", 2), ("other", 1))):
        scorer.add(number, [[1, 2, 3]] * count, 0, tenant)
    ended = list[tuple[int, int]]()
    steps = 0
    while scorer.busy:
        steps += 1
        if (done := scorer.step()) is not None:
            ended.append((done[0], steps))
    assert ended == [(3, 3), (2, 5), (0, 9), (1, 11)], "a text of each, in turn, however many one tenant has"
    assert not scorer._turns, "nothing is kept of those who are gone"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_small_cache_is_enough_for_all(model: Model, ahead: bool) -> None:
    """Texts hold nearly all of it while they are computed: newcomers wait, and answers that need a block, too."""
    small = replace(model, blocks=6, spare_blocks=0)
    engine = Engine(small, COST, ahead=ahead)
    embedder, scorer = Embedder(engine), Scorer(engine)
    embedder.most_rows = scorer.most_rows = 8
    params = SamplingParams(max_tokens=BLOCK_SLOTS + 8, ignore_eos=True)
    engine.add([1] * (BLOCK_SLOTS - 4), params)
    for _ in range(2):
        engine.step()
    long = [5] * (3 * BLOCK_SLOTS - 8)
    embedder.add(1, [long, long], "mean", normalize=True)
    scorer.add(2, [[6] * (2 * BLOCK_SLOTS)], 0)
    done, steps = list[int](), 0
    while engine.busy or embedder.busy or scorer.busy:
        steps += 1
        assert steps < 2000, "somebody waits for ever"
        if steps == 3:
            engine.add([2] * (4 * BLOCK_SLOTS), params)
        if engine.busy:
            engine.step()
        done += [found[0] for aside in (embedder, scorer) if aside.busy and (found := aside.step()) is not None]
        engine.check()
    assert sorted(done) == [1, 2]
    assert [timings.generated for timings in engine.timings.values()] == [params.max_tokens] * 2
    assert engine.pool.available == engine.pool.size
