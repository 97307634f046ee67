"""The size of a drafter follows from what passes cost and what others reached, and never grows with the price."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.models import ModelConfig, read_config
from slipstream.program import StepShape
from slipstream.roofline.cost import CostModel, Curve
from slipstream.roofline.speculation import tau_of
from slipstream.training import trainer, training
from slipstream.training.sizes import DSPARK_BLOCK, MOST_SHARE, Head, candidates
from slipstream.training.sizing import NO_WORSE, PRIORS, Candidate, Choice, Costs, Lesson, Shape, choose
from slipstream.weights.open import open_checkpoint
from tests.training.test_training import trained

RECORDS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*/cost-smollm2-135m.json"))
TRAININGS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*/training-smollm2-135m-*.json"))
SMOLLM_BYTES = 96_600_000
HEADS = [Head(np.arange(count, dtype=np.int32), covers) for count, covers in ((1024, 0.91), (2048, 0.94), (4096, 0.97))]
PARAMETERS = st.integers(100_000, 40_000_000)
SHAPES = st.lists(
    st.builds(
        Candidate, st.builds(Shape, st.integers(1, 3), st.just(64), st.just(1024)), PARAMETERS, st.floats(0.1, 3.0),
        st.floats(0.5, 1.0),
    ),
    min_size=1, max_size=12,
)  # fmt: skip
STEPS = st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8)
LESSONS = st.builds(Lesson, st.floats(1e3, 1e8), st.none() | st.floats(1.0, 1e5), st.floats(1e-5, 1e-2))


def costs_of(record: Path, block: int) -> Costs:
    """As the machine had them that made the record."""
    found = json.loads(record.read_text())["cost_model"]
    body, head = (Curve(tuple(found[p]["counts"]), tuple(found[p]["seconds"])) for p in ("body", "head"))
    cost = CostModel(body, head, tuple(found["attention"]), found["host"])
    return Costs(lambda n: cost.seconds(StepShape(n, n, 0, n * 256)), cost.drafted, SMOLLM_BYTES, block)


@pytest.fixture
def smollm_like(tiny_gguf: Path) -> ModelConfig:
    config = read_config(open_checkpoint(tiny_gguf))
    return replace(
        config, hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocabulary=49152,
        windows=config.windows[:1] * 30,
    )  # fmt: skip


def rising(extra: Sequence[float]) -> list[float]:
    seconds = [1.0]
    for more in extra:
        seconds.append(seconds[-1] + more)
    return seconds


@given(SHAPES, STEPS, LESSONS, st.sampled_from([0, 7]), st.sampled_from(sorted(PRIORS)), st.data())
def test_dearer_passes_never_lead_to_a_larger_drafter(
    found: list[Candidate], extra: list[float], lesson: Lesson, block: int, kind: str, data: st.DataObject
) -> None:
    seconds = rising(extra)
    cheap, dear = sorted(data.draw(st.lists(st.floats(1e-3, 50.0), min_size=2, max_size=2)))
    costs = Costs(lambda n: seconds[n - 1], data.draw(st.floats(0.0, 1.0)), 50_000_000, block)
    first, second = (
        choose(found, replace(costs, pass_over_bytes=price), PRIORS[kind], lesson, 5) for price in (cheap, dear)
    )
    assert second.chosen.candidate.parameters <= first.chosen.candidate.parameters
    assert second.drafts == first.drafts


@given(SHAPES, STEPS, LESSONS, st.sampled_from([0, 7]))
def test_what_is_chosen_is_as_good_as_the_best(
    found: list[Candidate], extra: list[float], lesson: Lesson, block: int
) -> None:
    """And whatever is larger is not; the table has it, and is in order."""
    seconds = rising(extra)
    choice = choose(found, Costs(lambda n: seconds[n - 1], 0.1, 50_000_000, block), PRIORS["eagle3"], lesson, 5)
    best = max(one.speedup for one in choice.ranked)
    assert choice.chosen.speedup >= NO_WORSE * best
    size = choice.chosen.candidate.parameters
    assert all(one.speedup < NO_WORSE * best for one in choice.ranked if one.candidate.parameters > size)
    table = choice.table()
    assert sum(row["chosen"] for row in table) == 1
    assert [row["speedup"] for row in table] == sorted((row["speedup"] for row in table), reverse=True)
    assert table[0]["speedup"] == best
    assert len(table) == min(6, len(found))


@given(LESSONS, st.floats(0.0, 0.3), st.floats(1e-4, 0.3))
def test_smaller_drafters_see_more(lesson: Lesson, share: float, more: float) -> None:
    assert 0 < lesson.seen(share + more) <= lesson.seen(share) <= lesson.tokens


@pytest.mark.parametrize("kind", sorted(PRIORS))
@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.parent.name)
def test_a_small_targets_drafter_stays_small(kind: str, record: Path, smollm_like: ModelConfig) -> None:
    """Also where nothing forbids larger ones; and where each of its bytes took ten times as long, it is smaller."""
    costs = costs_of(record, DSPARK_BLOCK if kind == "dspark" else 0)
    for lesson in (Lesson(34_000), Lesson(900_000, 1_020.0, 3e-4), Lesson(5_000_000)):
        found = candidates(kind, smollm_like, 1 << 40, HEADS)
        chosen = choose(found, costs, PRIORS[kind], lesson, 5).chosen
        assert chosen.share <= MOST_SHARE
        dear = choose(found, replace(costs, pass_over_bytes=7.0), PRIORS[kind], lesson, 5).chosen
        assert dear.share < chosen.share


@pytest.mark.parametrize("path", TRAININGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_prior_says_what_was_measured(path: Path, smollm_like: ModelConfig) -> None:
    """tau of recorded trainings, of 34 k to 640 k tokens, one to three layers and two kinds."""
    card = json.loads(path.read_text())
    head = Head(np.arange(card["draft_vocabulary"], dtype=np.int32), card["draft_vocabulary_covers"])
    layers = range(1, 4) if card["kind"] == "dspark" else (1,)
    known = [one for n in layers for one in candidates(card["kind"], smollm_like, 1 << 40, [head], n)]
    (trained,) = (one for one in known if one.parameters == card["parameters"])
    acceptance = PRIORS[card["kind"]].acceptance(trained, card["tokens_seen"])
    assert tau_of(acceptance, 5) == pytest.approx(card["tau_estimate"], rel=0.06)


def test_shapes_that_may_be_had(smollm_like: ModelConfig) -> None:
    """What is asked for is what there is to choose from; where nothing is small enough, anything."""
    found = candidates("dspark", smollm_like, SMOLLM_BYTES, HEADS)
    assert {one.shape.layers for one in found} == {1, 2}
    assert {one.shape.ffn for one in found} == {384, 768, 1152, 1536}
    smaller = candidates("dspark", smollm_like, SMOLLM_BYTES // 2, HEADS)
    assert all(one.bytes <= MOST_SHARE * SMOLLM_BYTES // 2 for one in smaller)
    assert 0 < len(smaller) < len(found)
    asked = candidates("dspark", smollm_like, SMOLLM_BYTES, HEADS[:1], layers=3, ffn=640)
    assert [one.shape for one in asked] == [Shape(3, 640, 1024)]
    assert len(candidates("eagle3", smollm_like, 1, HEADS)) == 12


def choosing(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings take the smallest shape from now on, or the largest."""

    def ordered(found: Sequence[Candidate], *rest: Any) -> Choice:
        choice = choose(found, *rest)
        return replace(choice, chosen=sorted(choice.ranked, key=lambda one: one.candidate.parameters)[place])

    monkeypatch.setattr(training, "choose", ordered)


def test_a_stopped_training_keeps_its_size(
    tiny_gguf: Path, tiny_traffic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the machine would have it otherwise by now. The card says what there was to choose from."""
    save = trainer.Trainer._save

    def stopped(self: trainer.Trainer) -> None:
        save(self)
        raise KeyboardInterrupt

    choosing(0, monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "SAVE_EVERY", 0.0)
        patched.setattr(trainer.Trainer, "_save", stopped)
        with pytest.raises(KeyboardInterrupt):
            trained(tiny_gguf, tiny_traffic, tmp_path / "d", rounds=2)
    choosing(-1, monkeypatch)
    card = trained(tiny_gguf, tiny_traffic, tmp_path / "d", rounds=2)
    assert card["resumed"]
    sizes = {row["parameters"]: row["chosen"] for row in card["sizes"]}
    assert len(sizes) > 1
    assert sizes == {size: size == min(sizes) for size in sizes}
    assert card["parameters"] == min(sizes)
    assert trained(tiny_gguf, tiny_traffic, tmp_path / "e", rounds=2)["parameters"] == max(sizes)


@pytest.mark.parametrize(("kind", "layout"), [("eagle3", "eagle3"), ("dspark", "speculators")])
def test_a_drafter_that_is_trained_on_keeps_its_size(
    kind: str, layout: str, tiny_gguf: Path, tiny_traffic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"kind": kind, "layout": layout, "rounds": 1}
    choosing(0, monkeypatch)
    first = trained(tiny_gguf, tiny_traffic, tmp_path / "a", **options)
    choosing(-1, monkeypatch)
    second = trained(tiny_gguf, tiny_traffic, tmp_path / "b", start_from=tmp_path / "a", **options)
    assert second["parameters"] == first["parameters"]
    assert trained(tiny_gguf, tiny_traffic, tmp_path / "c", **options)["parameters"] > first["parameters"]
