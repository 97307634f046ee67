"""The page of metrics is what the collectors make, and none is on it whose labels nobody has seen."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from slipstream.engine.messages import EngineInfo, RequestTimings, Stats
from tests.metrics_page import example, page, row

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_is_current() -> None:
    assert (DOCS / "metrics.md").read_text() == page(), "run python -m tests.metrics_page > docs/metrics.md"


@pytest.mark.parametrize("kind", [Stats, EngineInfo, RequestTimings])
def test_an_example_has_something_in_every_part(kind: type) -> None:
    assert all(getattr(example(kind), field.name) for field in dataclasses.fields(kind))


def test_a_series_that_shows_no_labels_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="has no sample"):
        row(GaugeMetricFamily("a", "A.", labels=["model_name"]))
    family = CounterMetricFamily("a", "A.", labels=["tag"])
    family.add_metric(["x"], 1.0)
    with pytest.raises(ValueError, match="model_name"):
        row(family)
