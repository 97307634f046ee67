"""The waterfall on made-up steps: parts add up, each injected second lands in its part, series and figure agree."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import numpy as np
import pytest

from slipstream.program import CacheGroup, CacheSpec, GroupKind, SpanShape, StepShape
from slipstream.program.op_classes import OP_CLASSES
from slipstream.roofline.accounting import Accounting, ClassWork, SpanRecord, StepRecord
from slipstream.roofline.cost import CostModel, Curve
from slipstream.roofline.figure import RooflinePoint, draw
from slipstream.roofline.waterfall import Limits, Waterfall, prometheus, split

CACHE = CacheSpec((CacheGroup(GroupKind.FULL, 4, 2, 64, 64),))
BYTES = {"qkv": 10e6, "attention_out": 10e6, "gate_up": 40e6, "down": 20e6, "logits": 20e6}
READ = 2e-3  # 100 MB at 50 GB/s
# A row in three costs as much as reading; a prompt's rows in proportion.
COST = CostModel(
    Curve((1, 3, 100), (1.6e-3, 1.6e-3, 53e-3)), Curve((1, 3, 100), (0.4e-3, 0.4e-3, 13e-3)), (0, 0, 1e-7, 0)
)
LIMITS = Limits(READ, 0.95, 100e6, BYTES)
MINE, OTHER = 7, 8


def decode(request: int, context: int = 100) -> SpanRecord:
    return SpanRecord(request, "decode", context, 1, 1, 1)


def step(
    spans: Sequence[SpanRecord] = (decode(MINE),), extra: dict[str, float] | None = None, **marks: float
) -> StepRecord:
    """A step that reads at the ceiling, with `extra` seconds in some classes and marks."""
    shape = StepShape.of_spans((SpanShape(s.start, s.rows, s.logit_rows) for s in spans), CACHE)
    kernels = dict.fromkeys(OP_CLASSES, 0.0)
    scale = COST.body.at(shape.rows) / COST.body.at(1)
    for name, nbytes in BYTES.items():
        head = COST.head.at(shape.logit_rows) / COST.head.at(1)
        kernels[name] = nbytes / 100e6 * READ * (head if name == "logits" else scale)
    kernels["attention"] = COST.attention_seconds(shape)
    for name, seconds in (extra or {}).items():
        kernels[name] += seconds
    classes = np.array([kernels[name] for name in OP_CLASSES])
    plain = {"idle": 0.0, "outside": 0.0, "scheduling": 1e-5, "dispatch": 0.0, "output": 1e-5, "stolen": 0.0} | marks
    total = float(classes.sum()) + plain.pop("unmarked", 0.0)
    stolen = plain.pop("stolen")
    return StepRecord(0.0, **plain, kernels=total, classes=classes, stolen=stolen, shape=shape, spans=tuple(spans))


def explain(steps: list[StepRecord], limits: Limits = LIMITS) -> Waterfall:
    wall = sum(s.seconds for s in steps) + sum(s.idle + s.outside for s in steps[1:])
    return split(steps, MINE, wall, limits, COST, CACHE, OP_CLASSES)


def test_parts_add_up_and_the_ceiling_is_the_read() -> None:
    result = explain([step() for _ in range(10)])
    assert sum(part.seconds for part in result.parts) == pytest.approx(result.seconds)
    assert result.ceiling == pytest.approx(0.95 * READ)
    assert result["packing"] == pytest.approx(0.05 * READ)
    assert abs(result.unexplained) < 1e-9
    assert result.fraction == pytest.approx(result.ceiling / result.seconds)


LOSS = 1e-3
INJECTED: dict[str, dict[str, object]] = {
    "scheduling": {"scheduling": 1e-5 + LOSS},
    "output": {"output": 1e-5 + LOSS},
    "outside": {"outside": LOSS},
    "idle": {"idle": LOSS},
    "sampling": {"extra": {"sample": LOSS}},
    "gate_up": {"extra": {"gate_up": LOSS}},
    "attention": {"extra": {"attention": LOSS}},
    "embed": {"extra": {"embed": LOSS}},
    "logits": {"extra": {"logits": LOSS}},
    "unexplained": {"unmarked": LOSS},
}


@pytest.mark.parametrize("part", INJECTED)
def test_a_loss_lands_in_its_part_and_in_no_other(part: str) -> None:
    plain, hurt = explain([step()] * 10), explain([step(**INJECTED[part])] * 10)  # type: ignore[arg-type]
    expected = LOSS * (0.9 if part in ("outside", "idle") else 1.0)  # the first step's wait is not counted
    names = {p.name for w in (plain, hurt) for p in w.parts}
    for name in names:
        assert hurt[name] - plain[name] == pytest.approx(expected if name == part else 0.0, abs=1e-9), name
    assert part in hurt.verdict()


def test_other_users() -> None:
    prompt = SpanRecord(OTHER, "prefill", 0, 60, 1, 0)
    plain = explain([step()] * 8)
    prefilled, shared = explain([step([decode(MINE), prompt])] * 8), explain([step([decode(MINE), decode(OTHER)])] * 8)
    grown = prefilled.seconds - plain.seconds
    assert prefilled["foreign prefill"] == pytest.approx(grown, rel=0.02)
    assert prefilled["other decodes"] == pytest.approx(0, abs=1e-6)
    assert shared["other decodes"] == pytest.approx(shared.seconds - plain.seconds, rel=0.02)
    without_me = explain([step(), step([prompt]), step()])
    assert without_me["foreign prefill"] == pytest.approx((step([prompt]).kernels) / 2, rel=0.05)


def test_threads_and_other_processes() -> None:
    stolen = explain([step(stolen=0.5e-3)] * 5)
    assert stolen["other processes"] == pytest.approx(0.5e-3)
    half = Limits(READ, 0.95, 100e6, BYTES, dict.fromkeys(OP_CLASSES, 0.5))
    twice = explain([step(extra={name: nbytes / 100e6 * READ for name, nbytes in BYTES.items()})] * 5, half)
    assert twice["threads"] == pytest.approx(READ, rel=0.02)
    assert twice["gate_up"] == pytest.approx(0, abs=1e-9)


def test_speculation_is_a_gain_and_may_pass_the_ceiling() -> None:
    verified = SpanRecord(MINE, "verify", 100, 3, 3, 3)
    result = explain([step([verified])] * 6)
    assert result.tokens == 18
    assert result["speculation"] < 0
    assert result.fraction > 1
    assert sum(part.seconds for part in result.parts) == pytest.approx(result.seconds)


def test_no_tokens_no_waterfall() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        explain([step([decode(OTHER)])])


def test_prometheus() -> None:
    result = explain([step()] * 4)
    lines = prometheus(result, {"model": 'a"b\\c\nd'}).splitlines()
    parts = [line for line in lines if line.startswith("slipstream_waterfall")]
    assert len(parts) == len(result.parts)
    assert r'model="a\"b\\c\nd"' in parts[0]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in parts) == pytest.approx(result.seconds, rel=1e-6)
    assert all(line.startswith("#") or line.rsplit(" ", 1)[0].startswith("slipstream_") for line in lines)


def test_the_figure_is_well_formed_and_shows_every_large_part() -> None:
    result = explain([step(extra={"down": LOSS}, outside=LOSS)] * 4)
    picture = draw(result, "a <model> & more", RooflinePoint(2.0, 8e10, 50e9, 1e12))
    root = ElementTree.fromstring(picture)
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert "a <model> & more" in texts
    for part in result.parts:
        if part.seconds > 0.01 * result.seconds:
            assert part.name in texts
    assert any("of the roof" in text for text in texts)


def test_accounts_by_class() -> None:
    accounts = Accounting(OP_CLASSES, {"down": ClassWork(20e6, 1000.0), "logits": ClassWork(5e6, 50.0, True)}, 10.0)
    prompt = SpanRecord(OTHER, "prefill", 0, 4, 0, 0)
    accounts.add(step([decode(MINE), SpanRecord(MINE, "verify", 5, 3, 3, 2)]))
    accounts.add(step([prompt]))
    assert accounts.bytes_by_class()["down"] == 40e6
    assert accounts.bytes_by_class()["logits"] == 5e6, "a step without logits does not read the head"
    assert accounts.operations_by_class()["down"] == 2 * 1000 * 8
    assert accounts.operations_by_class()["logits"] == 2 * 50 * 4
    assert accounts.totals.rows == {"decode": 1, "verify": 3, "prefill": 4}
    assert accounts.totals.wasted_drafts == 1
    nbytes, operations = accounts.work_of(accounts.records)
    assert nbytes == sum(accounts.bytes_by_class().values())
    assert operations == sum(accounts.operations_by_class().values())
