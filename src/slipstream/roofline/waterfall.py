"""The waterfall: from the ceiling to what a user got, as seconds per token that add up.

Every step that a request took part in is split. First what other requests' rows added (priced by the cost model),
then, of the request's own share: the read that the ceiling allows for, and what each part took beyond it. What the
marks and the kernels' clock do not cover is printed as unexplained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.program import CacheSpec, SpanShape, StepShape
from slipstream.roofline.accounting import SpanRecord, StepRecord
from slipstream.roofline.cost import CostModel

MATRICES = ("qkv", "attention_out", "gate_up", "down", "linear", "logits")
"""Classes whose time is reading weights."""
KERNELS = (*MATRICES, "attention", "embed", "norm", "other", "plan")

ADVICE = {
    "foreign prefill": "prompts of other users; read them in smaller chunks, or on another engine",
    "other decodes": "other users' tokens in the same steps; fewer at once makes each faster",
    "threads": "the engine has fewer threads than there are cores; raise --threads",
    "other processes": "something else runs on these cores; give the engine cores of its own",
    "cache reads": "the context itself; --kv-cache-dtype int8 halves it",
    "packing": "weights that take more bytes packed than in their file",
    "sampling": "drawing the token; fewer filters and no log-probabilities make it cheaper",
    "scheduling": "planning on the host; it counts most for small models",
    "drafting": "making drafts; a smaller drafter or shorter drafts cost less",
    "output": "stop conditions and text after each token",
    "accounting": "keeping these accounts",
    "outside": "whoever consumes the tokens (printing, HTTP) between steps",
    "idle": "no request was there",
    "speculation": "tokens that came without a read of their own",
    "wasted drafts": "drafted tokens that were rejected; shorten the draft",
    "unexplained": "time that no mark covers; the machine was disturbed",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the ceiling rests on, read in the same run: seconds of reading all packed weights with all usable cores.

    `needed` is the share of them that a token needs (its file may be smaller). `all_cores` is the share of its time
    that a class of work would take if the engine had a thread for every core; empty if it has.
    """

    read_seconds: float
    needed: float
    weight_bytes: float
    class_bytes: Mapping[str, float]
    all_cores: Mapping[str, float] = field(default_factory=dict)

    @property
    def bandwidth(self) -> float:
        """Bytes a second with all cores."""
        return self.weight_bytes / self.read_seconds

    @property
    def ceiling(self) -> float:
        """Seconds per token at the ceiling."""
        return self.read_seconds * self.needed


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds per token; negative where something is saved."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Parts in order, the ceiling first; they add up to `seconds`, the wall time per token."""

    seconds: float
    parts: tuple[Part, ...]
    tokens: int
    steps: int

    @property
    def ceiling(self) -> float:
        """Seconds per token at the ceiling."""
        return self.parts[0].seconds

    @property
    def tok_s(self) -> float:
        """Tokens a second that the user got."""
        return 1.0 / self.seconds

    @property
    def fraction(self) -> float:
        """Share of the ceiling; above 1 if speculation outran it."""
        return self.ceiling / self.seconds

    @property
    def unexplained(self) -> float:
        """Share of the time that no part covers."""
        return self["unexplained"] / self.seconds

    def __getitem__(self, name: str) -> float:
        """Seconds of a part; 0 if there is none."""
        return sum(part.seconds for part in self.parts if part.name == name)

    @property
    def largest(self) -> Part:
        """The part beyond the ceiling that costs most."""
        return max(self.parts[1:], key=lambda part: part.seconds)

    def facts(self) -> dict[str, Any]:
        """Everything, as `--json` prints it."""
        return {
            "seconds_per_token": self.seconds,
            "tok_s": self.tok_s,
            "ceiling_tok_s": 1.0 / self.ceiling,
            "fraction_of_ceiling": self.fraction,
            "parts": {part.name: part.seconds for part in self.parts},
            "unexplained": self.unexplained,
            "tokens": self.tokens,
            "steps": self.steps,
            "verdict": self.verdict(),
        }

    def verdict(self) -> str:
        """One sentence: where the user is, and which part is most to blame."""
        worst = self.largest
        points = 100 * worst.seconds / self.seconds
        advice = ADVICE.get(worst.name) or "kernel time beyond reading its weights; rows and threads decide it"
        return f"You are at {self.fraction:.0%} of the ceiling; {points:.0f} points are {worst.name} ({advice})."


class _Sum(dict[str, float]):
    def add(self, name: str, seconds: float) -> None:
        self[name] = self.get(name, 0.0) + seconds


def _shape(spans: Iterable[SpanRecord], cache: CacheSpec) -> StepShape:
    return StepShape.of_spans((SpanShape(s.start, s.rows, s.logit_rows) for s in spans), cache)


@dataclass(frozen=True, slots=True)
class _Share:
    """Which factor of a step's body, head and attention is left if some spans are taken out."""

    body: float
    head: float
    attention: float

    def of(self, name: str) -> float:
        return self.head if name in ("logits", "sample") else self.attention if name == "attention" else self.body


def _without(cost: CostModel, fewer: StepShape, all_rows: StepShape) -> _Share:
    def ratio(a: float, b: float) -> float:
        return min(a / b, 1.0) if b > 0 else 1.0

    return _Share(
        ratio(cost.body.at(fewer.rows), cost.body.at(all_rows.rows)),
        ratio(cost.head.at(fewer.logit_rows), cost.head.at(all_rows.logit_rows)),
        ratio(cost.attention_seconds(fewer), cost.attention_seconds(all_rows)),
    )


def split(
    records: Sequence[StepRecord],
    request: int,
    wall: float,
    limits: Limits,
    cost: CostModel,
    cache: CacheSpec,
    classes: Sequence[str],
) -> Waterfall:
    """The waterfall of `request` over `records`, the steps of its answer, which took `wall` seconds in all.

    The first record's waits before it are not counted: they belong to the time to the first token.
    """
    sums = _Sum()
    tokens = steps = 0
    for index, record in enumerate(records):
        own = [span for span in record.spans if span.request == request]
        tokens += sum(span.tokens for span in own)
        steps += bool(own)
        if index:
            sums.add("idle", record.idle)
            sums.add("outside", record.outside)
            sums.add("accounting", record.accounting)
        sums.add("scheduling", record.scheduling + record.dispatch)
        sums.add("drafting", record.drafting)
        sums.add("output", record.output)
        _split_step(sums, record, own, limits, cost, cache, classes)
    if not tokens:
        raise ValueError("the request has no tokens in these steps")
    _speculation(sums, tokens, steps, limits)
    per_token = {name: seconds / tokens for name, seconds in sums.items()}
    ceiling = per_token.pop("ceiling", 0.0)
    order = dict.fromkeys((*ADVICE, *KERNELS, *per_token))
    parts = [Part("ceiling", ceiling)]
    parts += [Part(name, per_token[name]) for name in order if per_token.get(name)]
    total = wall / tokens
    parts.append(Part("unexplained", total - sum(part.seconds for part in parts)))
    return Waterfall(total, tuple(parts), tokens, steps)


def _split_step(
    sums: _Sum,
    record: StepRecord,
    own: list[SpanRecord],
    limits: Limits,
    cost: CostModel,
    cache: CacheSpec,
    classes: Sequence[str],
) -> None:
    no_prefill = [s for s in record.spans if s in own or s.kind != "prefill"]
    everything, decodes, mine = record.shape, _shape(no_prefill, cache), _shape(own, cache)
    without_prefill, without_others = _without(cost, decodes, everything), _without(cost, mine, everything)
    useful = [s._replace(rows=s.tokens, logit_rows=s.tokens) if s.kind == "verify" and s.tokens else s for s in own]
    without_wasted = _without(cost, _shape(useful, cache), mine)
    in_classes = float(record.classes.sum())
    # A thread that could not run holds up whatever was running: it is taken off all classes alike.
    running = 1.0 - min(record.stolen / in_classes, 1.0) if in_classes else 1.0
    sums.add("other processes", in_classes * (1.0 - running))
    for name, measured in zip(classes, record.classes.tolist(), strict=True):
        seconds = measured * running
        sums.add("foreign prefill", seconds * (1.0 - without_prefill.of(name)))
        sums.add("other decodes", seconds * (without_prefill.of(name) - without_others.of(name)))
        seconds *= without_others.of(name)
        sums.add("wasted drafts", seconds * (1.0 - without_wasted.of(name)))
        seconds *= without_wasted.of(name)
        sums.add("threads", seconds * (1.0 - limits.all_cores.get(name, 1.0)))
        seconds *= limits.all_cores.get(name, 1.0)
        if not own:
            sums.add("other decodes", seconds)
        elif name == "sample":
            sums.add("sampling", seconds)
        elif name in MATRICES:
            _split_matrix(sums, name, seconds, limits, bool(mine.logit_rows))
        elif name == "attention":
            read = min(mine.kv_bytes / limits.bandwidth, seconds)
            sums.add("cache reads", read)
            sums.add("attention", seconds - read)
        else:
            sums.add(name, seconds)


def _split_matrix(sums: _Sum, name: str, seconds: float, limits: Limits, with_logits: bool) -> None:
    """Reading: the ceiling and what packing adds; the rest is the kernel's own."""
    if name == "logits" and not with_logits:
        sums.add(name, seconds)
        return
    read = limits.class_bytes.get(name, 0.0) / limits.bandwidth
    sums.add("ceiling", read * limits.needed)
    sums.add("packing", read * (1.0 - limits.needed))
    sums.add(name, seconds - read)


def _speculation(sums: _Sum, tokens: int, steps: int, limits: Limits) -> None:
    """Several tokens a step: the ceiling counts one read per token, and what is not read is a gain."""
    if tokens > steps:
        saved = (tokens - steps) * limits.ceiling
        sums.add("ceiling", saved)
        sums.add("speculation", -saved)


def prometheus(waterfall: Waterfall, labels: dict[str, str]) -> str:
    """The same numbers in Prometheus's text format."""
    fixed = "".join(f',{key}="{_escaped(value)}"' for key, value in labels.items())
    plain = "{" + fixed.lstrip(",") + "}" if fixed else ""
    lines = [
        "# HELP slipstream_waterfall_seconds_per_token Seconds per token by part, from the ceiling to the user.",
        "# TYPE slipstream_waterfall_seconds_per_token gauge",
        *(
            f'slipstream_waterfall_seconds_per_token{{part="{part.name}"{fixed}}} {part.seconds:.9g}'
            for part in waterfall.parts
        ),
        "# HELP slipstream_tokens_per_second Tokens a second that the user got.",
        "# TYPE slipstream_tokens_per_second gauge",
        f"slipstream_tokens_per_second{plain} {waterfall.tok_s:.9g}",
        "# HELP slipstream_fraction_of_ceiling Share of the ceiling.",
        "# TYPE slipstream_fraction_of_ceiling gauge",
        f"slipstream_fraction_of_ceiling{plain} {waterfall.fraction:.9g}",
    ]
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
