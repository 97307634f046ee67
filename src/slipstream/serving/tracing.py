"""Tracing: a span for every request, with OpenTelemetry, where the extra `otel` is installed and an endpoint is named.

The standard variables say where spans go (OTEL_EXPORTER_OTLP_ENDPOINT and the like). A request's span continues the
trace that its headers name, and has the field's names for what it was (gen_ai.*); spans inside it say how long it
waited, how long the prompt took and how long the answer. A request that was turned away, failed, or was left by its
client has a span as well, with the status ERROR and the reason; one that was wrong in itself has none.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.engine.messages import RequestTimings

log = logging.getLogger(__name__)
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Tracing:
    """Makes spans; without a tracer, none."""

    def __init__(self, tracer: Any = None, propagator: Any = None):
        self._tracer, self._propagator = tracer, propagator

    @classmethod
    def start(cls) -> Tracing:
        """As the environment says."""
        if not any(os.environ.get(name) for name in ENDPOINTS):
            return cls()
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            log.warning("an OTLP endpoint is named, but spans need more: pip install '.[otel]' in Slipstream's folder")
            return cls()
        name = os.environ.get("OTEL_SERVICE_NAME", "slipstream")
        provider = TracerProvider(resource=Resource.create({"service.name": name}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls.over(provider)

    @classmethod
    def over(cls, provider: Any) -> Tracing:
        """With a provider of one's own."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        return cls(provider.get_tracer("slipstream"), TraceContextTextMapPropagator())

    def begin(self, operation: str, model: str, headers: Mapping[str, str]) -> Span:
        """A request begins now."""
        return Span(self._tracer, self._propagator, operation, model, headers if self._tracer else {})


@dataclass
class Span:
    """A request's span; it is made when the request ends, with what is known then."""

    tracer: Any
    propagator: Any
    operation: str
    model: str
    headers: Mapping[str, str]
    begun: int = field(default_factory=time.time_ns)

    def end(self, ended: Sequence[RequestTimings] = (), problem: str = "") -> None:
        """The request has ended: well, with the timings of its answers, or for a `problem`. Once it counts."""
        if self.tracer is None:
            return
        context = self.propagator.extract(dict(self.headers))
        attributes = {
            "gen_ai.operation.name": self.operation, "gen_ai.system": "slipstream", "gen_ai.request.model": self.model,
            "gen_ai.usage.input_tokens": sum(t.prompt_tokens for t in ended),
            "gen_ai.usage.output_tokens": sum(t.generated_tokens for t in ended),
            "slipstream.cached_tokens": sum(t.cached_tokens for t in ended),
            "slipstream.accepted_tokens": sum(t.accepted_tokens for t in ended),
        }  # fmt: skip
        span = self.tracer.start_span(
            f"{self.operation} {self.model}", context, attributes=attributes, start_time=self.begun
        )
        if problem:
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, problem))
        for timings in ended:
            self._inside(span, timings)
        span.end()
        self.tracer = None

    def _inside(self, span: Any, timings: RequestTimings) -> None:
        from opentelemetry.trace import set_span_in_context

        parent, at = set_span_in_context(span), self.begun
        for name, seconds in (
            ("queue", timings.queue_seconds), ("prefill", timings.prefill_seconds), ("decode", timings.decode_seconds)
        ):  # fmt: skip
            inner = self.tracer.start_span(name, parent, start_time=at)
            at += int(seconds * 1e9)
            inner.end(at)
