"""The dashboard shows what there is: every metric in it is one that the server has, with the labels it has."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving.conftest import Server

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())


@pytest.fixture(scope="module")
def labels(server: Server) -> dict[str, set[str]]:
    """Labels of every sample after some traffic."""
    body = {"prompt": "abcabcabcabcabcabc", "max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    with server.client() as http:
        for _ in range(4):
            assert http.post("/v1/completions", json=body).status_code == 200
        http.post("/v1/completions", json={"prompt": 5})
        http.get("/explain")
        time.sleep(1.5)  # the engine is asked how it is once a second
        text = http.get("/metrics").text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


NOT_ALWAYS = {"slipstream_tau", "slipstream_waterfall_seconds_per_token", "slipstream_requests_failed_total"}
"""What is there only after a draft, a waterfall, a failure."""


def test_every_metric_is_one_that_there_is(labels: dict[str, set[str]]) -> None:
    seen = set()
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for name in re.findall(r"((?:vllm:|slipstream_)[a-z_]+)\{", target["expr"]):
                seen.add(name)
                assert name in labels or name in NOT_ALWAYS, f"{panel['title']}: {name}"
            by = re.findall(r"by \(([a-z_]+)\)", target["expr"])
            by += re.findall(r"\{\{([a-z_]+)\}\}", target["legendFormat"])
            names = re.findall(r"((?:vllm:|slipstream_)[a-z_]+)\{", target["expr"])
            for label in by:
                assert any(label in labels.get(name, {label}) for name in names), f"{panel['title']}: {label}"
    assert len(seen) > 20


def test_panels_do_not_overlap() -> None:
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
