"""Spans: one for each request, that continues the caller's trace, with what it waited for inside."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from slipstream.engine.messages import RequestTimings
from slipstream.serving.tracing import Tracing
from tests.serving.conftest import KEY, start, stop

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


def test_without_the_extra_it_is_said_and_all_else_goes_on(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is told where spans go, on a machine that cannot make them."""
    (tmp_path / "opentelemetry.py").write_text("raise ImportError('it is not installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    running = start(tiny_gguf, "--api-key", KEY, "--threads", "1", "--kv-cache-gb", "0.01")
    try:
        with running.client() as http:
            for stream in (False, True):
                body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True, "stream": stream}
                answer = http.post("/v1/completions", json=body, headers={"traceparent": PARENT})
                assert answer.status_code == 200
                assert '"finish_reason":"length"' in answer.text
    finally:
        stop(running)
    log = "".join(running.log)
    assert log.count("spans need more: pip install '.[otel]'") == 1
    assert "Traceback" not in log


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """An OTLP endpoint: its address, and what is posted to it."""
    posted: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def do_POST(self) -> None:
            posted.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", posted
    server.shutdown()
    server.server_close()


def test_a_server_exports_its_spans(
    tiny_gguf: Path, collector: tuple[str, list[tuple[str, bytes]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over OTLP, to where the standard variables say, the last ones when it is ended."""
    address, posted = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "tests")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    running = start(tiny_gguf, "--api-key", KEY, "--threads", "1", "--kv-cache-gb", "0.01")
    body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
    with running.client() as http:
        answer = http.post("/v1/completions", json=body, headers={"traceparent": PARENT})
    assert answer.status_code == 200
    stop(running)
    end = time.monotonic() + 10
    while not posted and time.monotonic() < end:
        time.sleep(0.05)
    assert {path for path, _ in posted} == {"/v1/traces"}
    exported = [ExportTraceServiceRequest.FromString(data) for _, data in posted]
    resource = exported[0].resource_spans[0].resource
    assert ("service.name", "tests") in [(a.key, a.value.string_value) for a in resource.attributes]
    spans = [s for e in exported for r in e.resource_spans for scope in r.scope_spans for s in scope.spans]
    assert {span.name for span in spans} == {"text_completion tiny", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans} == {PARENT.split("-")[1]}
