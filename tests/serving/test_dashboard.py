"""The dashboard shows what there is: every metric in it is one that the server has, with the labels it has."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.conftest import write_tiny_gguf
from tests.serving.conftest import KEY, start, stop

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
PANELS = {
    "throughput": {"vllm:generation_tokens_total", "vllm:prompt_tokens_total"},
    "share of the ceiling": {"slipstream_ceiling_fraction"},
    "waterfall": {"slipstream_waterfall_seconds_per_token"},
    "TTFT": {"vllm:time_to_first_token_seconds_bucket"},
    "TPOT": {"vllm:request_time_per_output_token_seconds_bucket"},
    "ITL": {"vllm:inter_token_latency_seconds_bucket"},
    "cache hits": {
        "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "slipstream_prefix_store_hits_total"
    },
    "tau": {"slipstream_tau"},
    "speed-up": {"slipstream_speedup_predicted", "slipstream_speedup_measured"},
    "drafts": {"vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"},
}  # fmt: skip
"""What must be seen, and the series of its panel."""


def series(expression: str) -> set[str]:
    """The metrics in an expression."""
    return set(re.findall(r"((?:vllm:|slipstream_)[a-z_]+)\{", expression))


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """All there is after some traffic: answers with drafts and without, a failure, a waterfall.

    The model is large enough that a step with drafts takes hardly longer than one without.
    """
    model = tmp_path_factory.mktemp("model") / "larger.gguf"
    write_tiny_gguf(model, 512, 8)
    server = start(model, "--api-key", KEY, "--threads", "1", "--kv-cache-gb", "0.05")
    body = {"prompt": "abcabcabcabcabcabc", "max_tokens": 100, "temperature": 0.0, "ignore_eos": True, "timings": True}
    accepted = 0
    try:
        with server.client() as http:
            for _ in range(8):  # what was said once is drafted when it is to be said again
                accepted += http.post("/v1/completions", json=body).json()["timings"][0]["accepted_tokens"]
            assert http.post("/v1/completions", json={"prompt": 5}).status_code == 400
            assert http.get("/explain").status_code == 200
            end = time.monotonic() + 10
            while True:  # the engine is asked how it is once a second
                families = text_string_to_metric_families(http.get("/metrics").text)
                found = [sample for family in families for sample in family.samples]
                counted = sum(sample.value for sample in found if sample.name == "slipstream_accepted_tokens_total")
                if counted == accepted or time.monotonic() > end:
                    break
                time.sleep(0.1)
    finally:
        stop(server)
    assert counted == accepted > 0
    return found


@pytest.fixture(scope="module")
def labels(samples: list[Sample]) -> dict[str, set[str]]:
    """Labels of every sample's name."""
    found: dict[str, set[str]] = {}
    for sample in samples:
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_is_one_that_there_is(labels: dict[str, set[str]]) -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            names = series(target["expr"])
            assert set() < names <= labels.keys(), panel["title"]
            by = re.findall(r"by \(([a-z_]+)\)", target["expr"])
            by += re.findall(r"\{\{([a-z_]+)\}\}", target["legendFormat"])
            for label in by:
                assert any(label in labels[name] for name in names), f"{panel['title']}: {label}"


@pytest.mark.parametrize("shown", PANELS.values(), ids=PANELS)
def test_what_has_a_panel(shown: set[str]) -> None:
    """One that shows it, and nothing else."""
    found = [{name for target in panel["targets"] for name in series(target["expr"])} for panel in DASHBOARD["panels"]]
    assert found.count(shown) == 1


def test_what_it_says_of_drafts_and_of_time(samples: list[Sample]) -> None:
    """A drafter's tau is above one when its drafts were taken; the waterfall has all parts of the report."""
    taus = [sample.value for sample in samples if sample.name == "slipstream_tau"]
    assert max(taus) > 1.0
    parts = {s.labels["part"]: s.value for s in samples if s.name == "slipstream_waterfall_seconds_per_token"}
    assert len(parts) > 5
    assert parts["ceiling"] > 0


def test_panels_do_not_overlap() -> None:
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
