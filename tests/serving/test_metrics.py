"""What metrics say of requests that ended without an answer: nothing that an answer's would be mistaken for."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from slipstream.engine import Engine, Model, Terms
from slipstream.engine.messages import RequestTimings, Stats
from slipstream.program.sampling import SamplingParams
from slipstream.scheduling import Limits
from slipstream.serving.engine_metrics import EngineCollector
from slipstream.serving.metrics import Metrics

ANSWERED = RequestTimings(7, 0, 5, 0.5, 0.25, 1.0, 0, 0.9)


def counts(metrics: Metrics) -> dict[str, float]:
    """Observations of each histogram, and requests that ended, by reason."""
    said = metrics.render().decode()
    found = re.findall(
        r'^vllm:(\w+)_(?:count|success_total)\{(?:finished_reason="(\w+)")?.*\} (\S+)$', said, re.MULTILINE
    )
    return {name + (reason and " " + reason): float(value) for name, reason, value in found}


def test_who_never_got_a_token_tells_nothing_of_how_long_tokens_take() -> None:
    metrics = Metrics("m", EngineCollector("m", lambda: (Stats(), None, 0)))
    metrics.count(replace(ANSWERED, generated_tokens=0, prefill_seconds=0.0, decode_seconds=0.0), "abort")
    waited = counts(metrics)
    assert waited["request_queue_time_seconds"] == waited["e2e_request_latency_seconds"] == 1
    for name in ("time_to_first_token", "request_prefill_time", "request_decode_time", "request_inference_time"):
        assert waited[f"{name}_seconds"] == 0, name
    metrics.count(ANSWERED, "stop")
    answered = counts(metrics)
    for name in ("time_to_first_token", "request_prefill_time", "request_decode_time", "request_inference_time"):
        assert answered[f"{name}_seconds"] == 1, name
    assert 'finished_reason="abort"' in metrics.render().decode()


@pytest.mark.parametrize("begun", [False, True])
def test_the_wait_of_who_was_late_is_waiting(tiny_model: Model, begun: bool) -> None:
    """Not decoding: without a first token there is nothing to divide by."""
    engine = Engine(tiny_model, limits=Limits(8, 2 if begun else 1), ahead=False)
    engine.add([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
    engine.step()
    late = engine.add([5] * 60, SamplingParams(max_tokens=5), Terms(timeout=3600.0))
    for _ in range(2):
        engine.step()
    (sequence,) = (s for s in engine.sequences if s.request == late)
    assert bool(sequence.blocks) == begun
    assert not sequence.generated
    sequence.deadline = 0.0
    while any(s.request == late for s in engine.sequences):
        engine.step()
    timings = engine.timings[late]
    assert timings.finished is not None
    assert timings.decode_seconds == 0.0
    assert (timings.queue_seconds < timings.finished - timings.arrived) == begun
