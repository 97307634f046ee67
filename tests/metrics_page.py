"""The page of metrics, as the collectors make them. `python -m tests.metrics_page > docs/metrics.md` makes it.

Everything that they read has a value made up from its type, so that every series has a sample that shows its labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from types import SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from prometheus_client.core import Metric

from slipstream.engine.messages import EngineInfo, RequestTimings, Stats
from slipstream.serving.engine_metrics import LABEL, EngineCollector
from slipstream.serving.metrics import Metrics

VALUES: dict[Any, Any] = {str: "x", int: 1, float: 1.0, bool: True}
OF_A_SERIES = {"counter": "_total"}
"""What Prometheus puts after the name of a family."""


def example(kind: Any) -> Any:
    """A value of a type, with something in every part."""
    inner = get_args(kind)
    if dataclasses.is_dataclass(kind):
        make: Any = kind
        hints = get_type_hints(make)
        return make(**{field.name: example(hints[field.name]) for field in dataclasses.fields(make)})
    match get_origin(kind):
        case origin if origin in (Union, UnionType):
            return example(inner[0])
        case origin if origin in (dict, Mapping):
            return {example(inner[0]): example(inner[1])}
        case origin if origin in (list, tuple, Sequence):
            return origin([example(inner[0])]) if origin is tuple else [example(inner[0])]
    return VALUES[kind]


def families() -> tuple[list[Metric], list[Metric], set[str]]:
    """The server's own, the engine's, and the names of those that only a server that records has."""
    engine = EngineCollector("x", lambda: (example(Stats), example(EngineInfo), 1))
    recorder: Any = SimpleNamespace(written=1, dropped=1, failure=None)
    metrics = Metrics("x", engine, recorder)
    metrics.count(example(RequestTimings), "stop")
    metrics.fail(500)
    metrics.explained({"ceiling": 1.0})
    engines = list(engine.collect())
    named = {family.name for family in engines}
    own = [family for family in metrics.registry.collect() if family.name not in named]
    plain = {family.name for family in Metrics("x", engine).registry.collect()}
    return own, engines, {family.name for family in own} - plain


def row(family: Metric, note: str = "") -> str:
    """A line of the table. Raises ValueError for a family that cannot be described."""
    if not family.samples:
        raise ValueError(f"{family.name} has no sample: have families() in tests/metrics_page.py give it one")
    labels = list(dict.fromkeys(label for sample in family.samples for label in sample.labels))
    if LABEL not in labels:
        raise ValueError(f"{family.name} has no {LABEL}, as all others have")
    others = ", ".join(f"`{label}`" for label in labels if label not in (LABEL, "le"))
    name = family.name + OF_A_SERIES.get(family.type, "")
    return f"| `{name}` | {family.type} | {others} | {family.documentation}{note} |"


def table(families: Iterable[Metric], recording: Set[str] = frozenset()) -> list[str]:
    """The table of some families."""
    rows = [row(family, " With `--record` only." if family.name in recording else "") for family in families]
    return ["| series | type | labels | |", "|---|---|---|---|", *rows]


def page() -> str:
    """All of it as Markdown."""
    own, engines, recording = families()
    lines = [
        "# Metrics", "",
        "What `GET /metrics` says, made by `python -m tests.metrics_page` from the collectors. Names that begin with",
        "`vllm:` mean what they mean in vLLM; ours begin with `slipstream_`. Every series has the label `model_name`;",
        "the tables have the others. One with others may be away until there is something to count. A histogram is",
        "`…_bucket`, `…_sum` and `…_count`. How to scrape them, and a dashboard: [operate](operate.md#metrics).", "",
        "## The server's", "", *table(own, recording), "",
        "## The engine's", "",
        "As it said when it was last asked, once a second. Counters begin at 0 again when the engine is started again.",
        "",
        *table(engines),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
