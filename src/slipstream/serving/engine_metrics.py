"""EngineCollector: the engine's own figures for Prometheus, taken from its last answer when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from slipstream.engine.messages import DraftStats, EngineInfo, RolloutStats, Stats
from slipstream.program import BLOCK_SLOTS
from slipstream.speculation.rollout import STAGES

LABEL = "model_name"


def _tau(entry: DraftStats) -> float:
    return 1.0 + entry.accepted / max(entry.rounds, 1)


class EngineCollector(Collector):
    """`now` gives the engine's stats, what was loaded (None: nothing yet), and how often it was started again."""

    def __init__(self, model: str, now: Callable[[], tuple[Stats, EngineInfo | None, int]]):
        self._model, self._now = model, now

    def describe(self) -> list[Metric]:
        """Nothing: what there is depends on the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All of it. Counters count from the engine's start."""
        stats, info, restarts = self._now()
        yield self._gauge("vllm:num_requests_running", "Sequences with a place in the cache.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait for one.", stats.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the cache that sequences hold, 0 to 1.", stats.kv_usage)
        yield self._counter("vllm:num_preemptions", "Times that a sequence lost its blocks.", stats.preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_queries)
        yield self._counter("vllm:prefix_cache_hits", "Tokens found there.", stats.prefix_hits)
        yield self._counter(
            "slipstream_prefix_store_hits",
            "Tokens found in the prefix cache that were read from disk.",
            stats.shelf_hits,
        )
        yield self._iterations(stats)
        yield self._counter("slipstream_saved", "Preemptions whose blocks were moved out of the cache.", stats.saved)
        yield self._counter("slipstream_steps", "Steps.", stats.steps)
        yield self._gauge("slipstream_engine_restarts", "Times the engine's process was started again.", restarts)
        yield self._by("slipstream_rows", "Rows computed.", "kind", stats.rows)
        yield self._by("slipstream_seconds", "Seconds on the critical path.", "part", stats.seconds)
        yield from self._drafts(stats)
        yield from self._rollout(stats.rollout)
        if info is not None:
            yield self._gauge(
                "slipstream_ceiling_tokens_per_second", "What reading the weights allows one user.", info.ceiling_tok_s
            )
            yield self._config(info)

    def _rollout(self, rollout: RolloutStats | None) -> Iterator[Metric]:
        """The drafter that was deployed last: how far it has come, and both drafters as they are judged."""
        stage = GaugeMetricFamily(
            "slipstream_rollout_stage", "The stage of the drafter that was deployed last; back: it was taken back.",
            labels=[LABEL, "stage"],
        )  # fmt: skip
        tau = GaugeMetricFamily(
            "slipstream_rollout_tau", "Tokens of a verification of four drafts, by which drafters are judged.",
            labels=[LABEL, "drafter"],
        )  # fmt: skip
        lower = GaugeMetricFamily(
            "slipstream_rollout_tau_at_least", "What that is at least, in all likelihood.", labels=[LABEL, "drafter"]
        )
        if rollout is not None:
            at = rollout.stage if rollout.outcome is None else "back"
            for name in (*STAGES, "back"):
                stage.add_metric([self._model, name], float(name == at))
            for name, arm in (("present", rollout.present), ("new", rollout.new)):
                tau.add_metric([self._model, name], arm.tau)
                lower.add_metric([self._model, name], arm.lower)
        yield from (stage, tau, lower)

    def _drafts(self, stats: Stats) -> Iterator[Metric]:
        """What drafting brought, in vLLM's names over all, and in ours by drafter and tag."""
        drafts = stats.drafts
        yield self._counter("vllm:spec_decode_num_drafts", "Verifications with a draft.", sum(d.rounds for d in drafts))
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", sum(d.drafted for d in drafts))
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted.", sum(d.accepted for d in drafts)
        )
        hits = [sum(column) for column in zip(*(d.hits for d in drafts), strict=True)]
        tries = [sum(column) for column in zip(*(d.tries for d in drafts), strict=True)]
        whose = [LABEL, "drafter", "tag"]
        yield self._by(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafted tokens accepted, by position.", "position",
            {str(position): hit for position, hit in enumerate(hits) if tries[position]},
        )  # fmt: skip
        for name, text, field in (
            ("slipstream_draft_tries", "Drafts at a position whose predecessors were all accepted.", "tries"),
            ("slipstream_draft_hits", "Drafts at a position that were accepted themselves.", "hits"),
        ):
            family = CounterMetricFamily(name, text, labels=[*whose, "position"])
            for entry in drafts:
                for position, (tried, value) in enumerate(zip(entry.tries, getattr(entry, field), strict=True)):
                    if tried:
                        family.add_metric([self._model, entry.drafter, entry.tag, str(position)], value)
            yield family
        for name, text, field in (
            ("slipstream_draft_rounds", "Verifications with a draft.", "rounds"),
            ("slipstream_drafted_tokens", "Tokens drafted.", "drafted"),
            ("slipstream_accepted_tokens", "Drafted tokens accepted.", "accepted"),
        ):
            family = CounterMetricFamily(name, text, labels=whose)
            for entry in drafts:
                family.add_metric([self._model, entry.drafter, entry.tag], getattr(entry, field))
            yield family
        for name, text, value in (
            ("slipstream_tau", "Tokens of a verification with a draft, the bonus token included.", _tau),
            ("slipstream_tau_without_bonus", "Drafted tokens that a verification accepted.", lambda d: _tau(d) - 1.0),
            ("slipstream_draft_speedup_predicted", "S that steps with its drafts were expected to have.",
             lambda d: d.speedup_predicted),
            ("slipstream_draft_speedup_measured", "S that they had, by what plain steps cost.",
             lambda d: d.speedup_measured),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(name, text, labels=whose)
            for entry in drafts:
                gauge.add_metric([self._model, entry.drafter, entry.tag], value(entry))
            yield gauge
        yield self._gauge(
            "slipstream_speedup_predicted", "S that steps with drafts were expected to have.", stats.speedup_predicted
        )
        yield self._gauge(
            "slipstream_speedup_measured", "S that they had, by what plain steps cost.", stats.speedup_measured
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[LABEL])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=[LABEL])
        family.add_metric([self._model], value)
        return family

    def _by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[LABEL, label])
        for key, value in values.items():
            family.add_metric([self._model, key], value)
        return family

    def _iterations(self, stats: Stats) -> Metric:
        """Rows a step, as a histogram whose buckets are powers of two."""
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Rows of a step.", labels=[LABEL])
        buckets, count = [], 0
        for power in range(max(stats.step_rows, default=0) + 1):
            count += stats.step_rows.get(power, 0)
            buckets.append((str(float(1 << power)), float(count)))
        family.add_metric([self._model], [*buckets, ("+Inf", float(count))], sum(stats.rows.values()))
        return family

    def _config(self, info: EngineInfo) -> Metric:
        labels = {
            LABEL: self._model,
            "block_size": str(BLOCK_SLOTS),
            "cache_dtype": info.kv_format,
            "enable_prefix_caching": str(info.prefix_cache),
            "num_gpu_blocks": str(info.cache_tokens // BLOCK_SLOTS),
            "num_cpu_blocks": str(info.spare_tokens // BLOCK_SLOTS),
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "How the cache is laid out.", labels=list(labels))
        family.add_metric(list(labels.values()), 1.0)
        return family
