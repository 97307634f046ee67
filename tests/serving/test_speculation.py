"""Speculation through the server: the same answers, its figures in usage, timings and metrics, events of one size."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.engine.output import Chunk
from slipstream.serving.flush import Flush
from tests.serving.conftest import KEY, Server, start, stop
from tests.speculation.folders import eagle3_folder

PROMPT = "one two three four five six seven eight\n" * 8
OPTIONS = ("--api-key", KEY, "--kv-cache-gb", "0.1", "--max-model-len", "1024")


@pytest.fixture(scope="module")
def plain(smollm: Path) -> Iterator[Server]:
    running = start(smollm, *OPTIONS, "--speculative", "off")
    yield running
    stop(running)


@pytest.fixture(scope="module")
def drafted(smollm: Path) -> Iterator[Server]:
    running = start(smollm, *OPTIONS, "--speculative", "suffix", "--fixed-size-flush", "4")
    yield running
    stop(running)


def complete(server: Server, tag: str = "tests", **fields: object) -> dict[str, object]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 120, "temperature": 0, "seed": 1, "ignore_eos": True}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body | fields, headers={"X-Slipstream-Tag": tag})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.features("text drafts", "sampling", "n")
@pytest.mark.features("text drafts", "stop")
@pytest.mark.features("text drafts", "logprobs")
def test_the_same_answers_and_figures_besides(plain: Server, drafted: Server) -> None:
    accepted = 0
    for fields in ({}, {"temperature": 0.8}, {"n": 2, "temperature": 0.5}, {"stop": ["assistant"]}, {"logprobs": 2}):
        complete(drafted, **fields)  # what was said once is drafted when it is to be said again
        ours, theirs = complete(drafted, **fields), complete(plain, **fields)
        assert ours["choices"] == theirs["choices"]
        details = ours["usage"]["completion_tokens_details"]  # type: ignore[index]
        accepted += details["accepted_prediction_tokens"]
    assert accepted > 0, "beside a busy process it may not pay for one of them, but for all"
    for _ in range(10):
        report = complete(drafted, timings=True)
        if report["timings"][0]["verifications"]:  # type: ignore[index]
            break
    details = report["usage"]["completion_tokens_details"]  # type: ignore[index]
    (timings,) = report["timings"]  # type: ignore[misc]
    assert timings["verifications"] > 0
    assert timings["accepted_tokens"] == details["accepted_prediction_tokens"]
    assert timings["drafted_tokens"] - timings["accepted_tokens"] == details["rejected_prediction_tokens"]
    assert timings["tau"] == pytest.approx(1 + timings["accepted_tokens"] / timings["verifications"])
    none = complete(plain)["usage"]["completion_tokens_details"]  # type: ignore[index]
    assert set(none.values()) == {0}


def test_metrics_by_drafter_and_tag(drafted: Server) -> None:
    complete(drafted)
    with drafted.client() as client:
        for _ in range(100):  # the engine is asked for its figures every now and then
            text = client.get("/metrics").text
            if 'tag="tests"' in text:
                break
            time.sleep(0.1)
    assert 'vllm:spec_decode_num_drafts_total{model_name="tiny"}' in text
    assert 'slipstream_drafted_tokens_total{drafter="suffix",model_name="tiny",tag="tests"}' in text
    assert 'slipstream_tau{drafter="suffix",model_name="tiny",tag="tests"}' in text
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="0"}' in text
    for name in ("slipstream_speedup_predicted", "slipstream_speedup_measured"):
        assert f'{name}{{model_name="tiny"}}' in text


def test_every_tag_has_its_own_figures(drafted: Server) -> None:
    """One's drafts are what was said before, word for word; the other's are of a text that is continued otherwise."""
    rows: dict[str, dict[str, float]] = {}
    with drafted.client() as client:

        def figures() -> dict[str, dict[str, float]]:
            found = client.get("/explain").json()["drafts"]
            return {row["tag"]: row for row in found if row["drafter"] == "suffix"}

        for number in range(20):  # beside a busy process drafts may not pay at first
            complete(drafted, tag="again", max_tokens=100)
            complete(drafted, tag="never", max_tokens=60, temperature=1.5, seed=number)
            rows = figures()
            if rows.keys() >= {"again", "never"} and rows["again"]["verifications"] > 8:
                break
        for _ in range(50):  # the engine is asked for its figures every now and then
            time.sleep(0.2)
            before, rows = rows, figures()
            if rows == before:
                break
        text = client.get("/metrics").text
    assert rows["again"]["tau"] > rows["never"]["tau"]
    assert rows["again"]["speedup_predicted"] != rows["never"]["speedup_predicted"]
    assert rows["again"]["speedup_measured"] != rows["never"]["speedup_measured"]
    labels = 'drafter="suffix",model_name="tiny",tag='
    for tag, row in rows.items():
        told = {
            name: float(line.split()[1])
            for line in text.splitlines()
            for name in ("drafted_tokens_total", "accepted_tokens_total", "tau", "draft_speedup_measured")
            if line.startswith(f'slipstream_{name}{{{labels}"{tag}"}}')
        }
        assert told["drafted_tokens_total"] == row["drafted"]
        assert told["accepted_tokens_total"] == row["accepted"]
        assert told["tau"] == pytest.approx(row["tau"])
        assert told["draft_speedup_measured"] == pytest.approx(row["speedup_measured"])


@pytest.mark.features("text drafts", "streaming")
def test_events_of_one_size(plain: Server, drafted: Server) -> None:
    sizes: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    for name, server in (("plain", plain), ("drafted", drafted)):
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 42, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "logprobs": 0, "stream_options": {"include_usage": True}}
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json=body) as stream,
        ):
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        choices = [event["choices"][0] for event in events if event["choices"]]
        sizes[name] = [len(choice["logprobs"]["tokens"]) for choice in choices]
        texts[name] = "".join(choice["text"] for choice in choices)
        details = events[-1]["usage"]["completion_tokens_details"]
        assert name == "drafted" or not details["accepted_prediction_tokens"]
    assert texts["plain"] == texts["drafted"]
    assert sizes["drafted"] == [4] * 10 + [2]
    assert set(sizes["plain"]) == {1}


def test_a_drafters_folder_can_be_served(tiny_gguf: Path, tmp_path: Path) -> None:
    answers = []
    for speculative in (str(eagle3_folder(tmp_path)), "off"):
        server = start(
            tiny_gguf, "--api-key", KEY, "--threads", "1", "--kv-cache-gb", "0.01", "--speculative", speculative
        )
        answers.append(complete(server, max_tokens=60, temperature=0.9)["choices"])
        stop(server)
    assert answers[0] == answers[1]


def test_a_tag_is_short(plain: Server) -> None:
    with plain.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "a", "metadata": {"tag": "x" * 65}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "metadata"


def chunk(choice: int, tokens: int, reason: str | None = None) -> Chunk:
    return Chunk(0, choice, "x" * tokens, (1,) * tokens, (), reason)  # type: ignore[arg-type]


def test_flush() -> None:
    together = Flush()
    assert together.add([chunk(0, 1)]) == [chunk(0, 1)]
    assert together.add([chunk(0, 1), chunk(0, 1), chunk(1, 1)]) == [chunk(0, 2), chunk(1, 1)]
    fixed = Flush(3)
    assert fixed.add([chunk(0, 1), chunk(0, 1)]) == []
    assert fixed.add([chunk(1, 1), chunk(0, 1), chunk(0, 1)]) == [chunk(0, 3)]
    assert fixed.add([chunk(0, 1, "stop")]) == [chunk(0, 2, "stop")]
    assert fixed.add([chunk(1, 1, "length")]) == [chunk(1, 2, "length")]


def test_a_step_that_brings_more_than_an_event_holds_does_not_show() -> None:
    """One event a step; what is left comes with the next ones, and all of it at the end, in events of the same size."""
    flush = Flush(3)
    assert flush.add([chunk(0, 1)] * 11 + [chunk(1, 1)] * 6) == [chunk(0, 3), chunk(1, 3)]
    assert flush.add([chunk(0, 1)]) == [chunk(0, 3)]
    assert flush.add([chunk(1, 1)]) == [chunk(1, 3)]
    assert flush.add([chunk(1, 1)]) == []
    assert flush.add([chunk(0, 1), chunk(0, 1, "stop")]) == [chunk(0, 3), chunk(0, 3), chunk(0, 2, "stop")]
    assert flush.add([chunk(1, 1, "length")]) == [chunk(1, 3, "length")]
