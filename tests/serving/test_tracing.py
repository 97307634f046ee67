"""Spans: one for each request, that continues the caller's trace, with what it waited for inside."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from slipstream.engine.messages import RequestTimings
from slipstream.serving.tracing import Tracing

TIMINGS = RequestTimings(100, 32, 20, 0.5, 0.25, 1.0, 0, 0.9, accepted_tokens=7)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_span_for_a_request() -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    span = Tracing.over(provider).begin("chat", "m", {"traceparent": PARENT})
    span.end([TIMINGS])
    span.end(problem="it has ended already")
    assert len(memory.get_finished_spans()) == 4
    spans = {span.name: span for span in memory.get_finished_spans()}
    whole = spans["chat m"]
    assert whole.status.is_ok
    assert whole.attributes is not None
    assert whole.attributes["gen_ai.usage.input_tokens"] == 100
    assert whole.attributes["gen_ai.usage.output_tokens"] == 20
    assert whole.context is not None
    assert f"{whole.context.trace_id:032x}" == PARENT.split("-")[1]
    assert whole.parent is not None
    assert f"{whole.parent.span_id:016x}" == PARENT.split("-")[2]
    at = whole.start_time
    for name, seconds in (("queue", 0.5), ("prefill", 0.25), ("decode", 1.0)):
        inner = spans[name]
        assert inner.parent is not None
        assert inner.parent.span_id == whole.context.span_id
        assert inner.start_time == at
        assert inner.end_time == at + int(seconds * 1e9)  # type: ignore[operator]
        at = inner.end_time


def test_without_an_endpoint_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    Tracing.start().begin("chat", "m", {}).end([TIMINGS])
