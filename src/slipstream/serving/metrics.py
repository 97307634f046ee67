"""Prometheus metrics: vLLM's names where the meaning is the same, ours with slipstream_."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client import Counter as PrometheusCounter

from slipstream.engine.messages import RequestTimings
from slipstream.engine.output import Chunk
from slipstream.serving.engine_metrics import EngineCollector
from slipstream.training.recorder import Recorder

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SHORT = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
RATES = 10_000
TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


class Gaps:
    """Times between an answer's tokens, kept until it ends: a histogram costs more than a stream's token should."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: dict[int, float] = {}

    def hear(self, chunks: Sequence[Chunk]) -> None:
        """Tokens have come."""
        now = time.perf_counter()
        if len(chunks) == 1:
            self._note(chunks[0].choice, len(chunks[0].token_ids), now)
            return
        tokens: Counter[int] = Counter()
        for chunk in chunks:
            tokens[chunk.choice] += len(chunk.token_ids)
        for choice, count in tokens.items():
            self._note(choice, count, now)

    def _note(self, choice: int, tokens: int, now: float) -> None:
        """Tokens that came together share the time since those before."""
        if not tokens:
            return
        if (before := self._last.get(choice)) is not None:
            self.seconds += [(now - before) / tokens] * tokens
        self._last[choice] = now


class Metrics:
    """The server's registry: what it counts itself, and the engine's figures (see EngineCollector)."""

    def __init__(self, model: str, engine: EngineCollector, recorder: Recorder | None = None):
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.rates: deque[float] = deque(maxlen=RATES)
        """Tokens a second of the latest answers, each after its first token."""
        self.registry.register(engine)
        self._model = model
        label = ["model_name"]

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, label, registry=self.registry).labels(model)

        def counter(name: str, text: str) -> PrometheusCounter:
            return PrometheusCounter(name, text, label, registry=self.registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(name, text, label, registry=self.registry, buckets=buckets).labels(model)

        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts, counted when a request ends.")
        self.cached_tokens = counter("vllm:prompt_tokens_cached", "Of them, those that came from the prefix cache.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated, counted when a request ends.")
        self.success = PrometheusCounter(
            "vllm:request_success",
            "Requests that ended, by reason; abort: their time was over.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.failed = PrometheusCounter(
            "slipstream_requests_failed",
            "Requests that got an error; 499: their client left.",
            ["model_name", "status"],
            registry=self.registry,
        )
        self.first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self.per_token = histogram("vllm:request_time_per_output_token_seconds", "Mean of a request.", SHORT)
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self.queue = histogram("vllm:request_queue_time_seconds", "From arrival to the first step.")
        self.prefill = histogram("vllm:request_prefill_time_seconds", "From the first step to the first token.")
        self.between_tokens = histogram("vllm:inter_token_latency_seconds", "Between two tokens of an answer.", SHORT)
        self.inference = histogram("vllm:request_inference_time_seconds", "From the first step to the last token.")
        self.decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last.")
        self.prompt_length = histogram("vllm:request_prompt_tokens", "Tokens of a request's prompt.", TOKENS)
        self.answer_length = histogram("vllm:request_generation_tokens", "Tokens of a request's answer.", TOKENS)
        if recorder is not None:
            for name, text, read in (
                ("slipstream_recorded", "Answers written to the traffic file.", lambda: recorder.written),
                ("slipstream_record_drops", "Answers that could not be written in time.", lambda: recorder.dropped),
                (
                    "slipstream_recording",
                    "Whether answers are recorded; 0: it failed.",
                    lambda: not recorder.failure,
                ),
            ):
                gauge(name, text).set_function(read)
        self.fraction = gauge("slipstream_ceiling_fraction", "Share of it that the last request got.")
        self.waterfall = Gauge(
            "slipstream_waterfall_seconds_per_token",
            "Seconds per token by part, of the latest traffic, when it was last explained.",
            ["model_name", "part"],
            registry=self.registry,
        )

    def count(self, timings: RequestTimings, reason: str) -> None:
        """A request has ended. One without a token tells nothing of how long tokens take."""
        self.prompt_tokens.inc(timings.prompt_tokens)
        self.cached_tokens.inc(timings.cached_tokens)
        self.generation_tokens.inc(timings.generated_tokens)
        self.success.labels(self._model, reason).inc()
        self.queue.observe(timings.queue_seconds)
        if timings.generated_tokens:
            self.prefill.observe(timings.prefill_seconds)
            self.decode.observe(timings.decode_seconds)
            self.inference.observe(timings.prefill_seconds + timings.decode_seconds)
            self.first_token.observe(timings.queue_seconds + timings.prefill_seconds)
        self.whole.observe(timings.queue_seconds + timings.prefill_seconds + timings.decode_seconds)
        if (later := timings.later_tokens) > 0:
            self.per_token.observe(timings.decode_seconds / later)
            self.rates.append(later / max(timings.decode_seconds, 1e-9))
        self.prompt_length.observe(timings.prompt_tokens)
        self.answer_length.observe(timings.generated_tokens)
        self.fraction.set(timings.ceiling_fraction)

    def fail(self, status: int) -> None:
        """A request got an error."""
        self.failed.labels(self._model, str(status)).inc()

    def gaps(self, gaps: Gaps) -> None:
        """An answer has ended, well or not: the times between its tokens."""
        for seconds in gaps.seconds:
            self.between_tokens.observe(seconds)
        gaps.seconds.clear()

    def render(self) -> bytes:
        """All of it as text."""
        return generate_latest(self.registry)

    def explained(self, parts: dict[str, float]) -> None:
        """The waterfall as gauges."""
        for part, seconds in parts.items():
            self.waterfall.labels(self._model, part).set(seconds)
