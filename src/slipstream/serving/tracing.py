"""Tracing: a span for every request, with OpenTelemetry, where the extra `otel` is installed and an endpoint is named.

The standard variables say where spans go (OTEL_EXPORTER_OTLP_ENDPOINT and the like). A request's span continues the
trace that its headers name, and has the field's names for what it was (gen_ai.*); spans inside it say how long it
waited, how long the prompt took and how long the answer.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
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
            log.warning("an OTLP endpoint is named, but spans need the extra: pip install 'slipstream[otel]'")
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

    def ended(
        self, operation: str, model: str, headers: Mapping[str, str], begun: float, ended: Sequence[RequestTimings]
    ) -> None:
        """A request has ended that `begun` at so many seconds since the epoch."""
        if self._tracer is None:
            return
        context = self._propagator.extract(dict(headers))
        attributes = {
            "gen_ai.operation.name": operation, "gen_ai.system": "slipstream", "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": sum(t.prompt_tokens for t in ended),
            "gen_ai.usage.output_tokens": sum(t.generated_tokens for t in ended),
            "slipstream.cached_tokens": sum(t.cached_tokens for t in ended),
            "slipstream.accepted_tokens": sum(t.accepted_tokens for t in ended),
        }  # fmt: skip
        now = time.time_ns()
        span = self._tracer.start_span(
            f"{operation} {model}", context, attributes=attributes, start_time=int(begun * 1e9)
        )  # fmt: skip
        for timings in ended:
            self._inside(span, timings, int(begun * 1e9))
        span.end(now)

    def _inside(self, span: Any, timings: RequestTimings, at: int) -> None:
        from opentelemetry.trace import set_span_in_context

        parent = set_span_in_context(span)
        for name, seconds in (
            ("queue", timings.queue_seconds), ("prefill", timings.prefill_seconds), ("decode", timings.decode_seconds)
        ):  # fmt: skip
            inner = self._tracer.start_span(name, parent, start_time=at)
            at += int(seconds * 1e9)
            inner.end(at)
