"""Prometheus metrics: vLLM's names where the meaning is the same, ours with slipstream_."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from slipstream.engine.messages import EngineInfo, RequestTimings, Stats

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SHORT = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


class Metrics:
    """The server's registry. Gauges are set from the engine's last answer when somebody asks."""

    def __init__(self, model: str):
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._model = model
        label = ["model_name"]

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, label, registry=self.registry).labels(model)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, label, registry=self.registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(name, text, label, registry=self.registry, buckets=buckets).labels(model)

        self.running = gauge("vllm:num_requests_running", "Sequences with a place in the cache.")
        self.waiting = gauge("vllm:num_requests_waiting", "Sequences that wait for one.")
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of the cache that sequences hold, 0 to 1.")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = counter("vllm:prompt_tokens_cached", "Of them, those that came from the prefix cache.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self.success = Counter(
            "vllm:request_success",
            "Requests that ended well.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.failed = Counter(
            "slipstream_requests_failed",
            "Requests that got an error.",
            ["model_name", "status"],
            registry=self.registry,
        )
        self.first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self.per_token = histogram("vllm:request_time_per_output_token_seconds", "Mean of a request.", SHORT)
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self.queue = histogram("vllm:request_queue_time_seconds", "From arrival to the first step.")
        self.prefill = histogram("vllm:request_prefill_time_seconds", "From the first step to the first token.")
        self.decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last.")
        self.prompt_length = histogram("vllm:request_prompt_tokens", "Tokens of a request's prompt.", TOKENS)
        self.answer_length = histogram("vllm:request_generation_tokens", "Tokens of a request's answer.", TOKENS)
        self.preemptions = gauge("vllm:num_preemptions", "Sequences computed again, since the engine's start.")
        self.prefix_queries = gauge("vllm:prefix_cache_queries", "Tokens looked up, since the engine's start.")
        self.prefix_hits = gauge("vllm:prefix_cache_hits", "Tokens found, since the engine's start.")
        self.steps = gauge("slipstream_steps", "Steps, since the engine's start.")
        self.restarts = gauge("slipstream_engine_restarts", "Times the engine's process was started again.")
        self.ceiling = gauge("slipstream_ceiling_tokens_per_second", "What reading the weights allows one user.")
        self.fraction = gauge("slipstream_ceiling_fraction", "Share of it that the last request got.")
        self.rows = Gauge("slipstream_rows", "Rows computed.", ["model_name", "kind"], registry=self.registry)
        self.seconds = Gauge(
            "slipstream_seconds", "Seconds on the critical path.", ["model_name", "part"], registry=self.registry
        )
        self.waterfall = Gauge(
            "slipstream_waterfall_seconds_per_token",
            "Seconds per token by part, of the latest traffic, when it was last explained.",
            ["model_name", "part"],
            registry=self.registry,
        )

    def count(self, timings: RequestTimings, reason: str) -> None:
        """A request has ended."""
        self.prompt_tokens.inc(timings.prompt_tokens)
        self.cached_tokens.inc(timings.cached_tokens)
        self.generation_tokens.inc(timings.generated_tokens)
        self.success.labels(self._model, reason).inc()
        self.queue.observe(timings.queue_seconds)
        self.prefill.observe(timings.prefill_seconds)
        self.decode.observe(timings.decode_seconds)
        self.first_token.observe(timings.queue_seconds + timings.prefill_seconds)
        self.whole.observe(timings.queue_seconds + timings.prefill_seconds + timings.decode_seconds)
        if timings.generated_tokens > 1:
            self.per_token.observe(timings.decode_seconds / (timings.generated_tokens - 1))
        self.prompt_length.observe(timings.prompt_tokens)
        self.answer_length.observe(timings.generated_tokens)
        self.fraction.set(timings.ceiling_fraction)

    def fail(self, status: int) -> None:
        """A request got an error."""
        self.failed.labels(self._model, str(status)).inc()

    def render(self, stats: Stats, info: EngineInfo | None, restarts: int) -> bytes:
        """All of it as text."""
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.kv_usage.set(stats.kv_usage)
        self.preemptions.set(stats.preemptions)
        self.prefix_queries.set(stats.prefix_queries)
        self.prefix_hits.set(stats.prefix_hits)
        self.steps.set(stats.steps)
        self.restarts.set(restarts)
        if info is not None:
            self.ceiling.set(info.ceiling_tok_s)
        for kind, count in stats.rows.items():
            self.rows.labels(self._model, kind).set(count)
        for part, seconds in stats.seconds.items():
            self.seconds.labels(self._model, part).set(seconds)
        return generate_latest(self.registry)

    def explained(self, parts: dict[str, float]) -> None:
        """The waterfall as gauges."""
        for part, seconds in parts.items():
            self.waterfall.labels(self._model, part).set(seconds)
