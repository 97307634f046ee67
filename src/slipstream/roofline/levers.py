"""Levers: every known optimisation, sorted by the term of the ceiling it touches, with its predicted gain.

A step reads bytes at a bandwidth; speculation and batching put more rows on a read. An optimisation that touches
none of the three does nothing for one user, however good it is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from slipstream.errors import UsageError
from slipstream.roofline.ceiling import Ceiling, Setting, ceiling, verify_cost
from slipstream.roofline.precision import find_precision
from slipstream.roofline.speculation import DraftPlan, report
from slipstream.roofline.work import kv_bytes_held, model_bytes

Term = Literal["bandwidth", "bytes", "rows per read", "none"]
TERMS: tuple[Term, ...] = ("bandwidth", "bytes", "rows per read", "none")
Layer = Literal["scheduling", "kv cache", "kernels", "precision", "parallelism", "speculation"]
LAYERS: tuple[Layer, ...] = ("scheduling", "kv cache", "kernels", "precision", "parallelism", "speculation")

Change = Callable[[Setting], Setting]
NO_HELP = 1.005
"""A gain up to here is none."""


@dataclass(frozen=True, slots=True)
class Lever:
    """An optimisation: what it does to a setting, or what a drafter of typical quality it is.

    `note` says what was assumed; `flag` how to switch it on here, if it exists here.
    """

    name: str
    layer: Layer
    term: Term
    change: Change | None = None
    draft: DraftPlan | None = None
    note: str = ""
    flag: str = ""


@dataclass(frozen=True, slots=True)
class Gain:
    """A lever's predicted factor on tokens a second, for one user and for all together."""

    name: str
    layer: Layer
    term: Term
    one_user: float
    throughput: float
    note: str = ""
    flag: str = ""
    fits: bool | None = None

    @property
    def helps_one_user(self) -> bool:
        """Whether one user gains at all."""
        return self.one_user > NO_HELP


def _weights(name: str) -> Change:
    def change(s: Setting) -> Setting:
        new = find_precision(name)
        return replace(s, precision=new) if new.bits < s.precision.bits else s

    return change


def _head(bits: float) -> Change:
    return lambda s: replace(s, precision=replace(s.precision, head_bits=min(bits, s.precision.head)))


def _kv(bits: float) -> Change:
    return lambda s: replace(s, kv_bits=min(bits, s.kv_bits))


def _bandwidth(factor: float) -> Change:
    return lambda s: replace(s, hardware=replace(s.hardware, bandwidth=s.hardware.bandwidth * factor))


def _operations(factor: float) -> Change:
    def change(s: Setting) -> Setting:
        return replace(s, hardware=replace(s.hardware, peak={k: v * factor for k, v in s.hardware.peak.items()}))

    return change


def _no_overhead(s: Setting) -> Setting:
    return replace(s, hardware=replace(s.hardware, step_overhead=0.0))


def _devices(n: int) -> Change:
    return lambda s: replace(s, devices=s.devices * n)


def _batch_to_knee(s: Setting) -> Setting:
    """As many sequences as reading leaves time for and memory holds; unchanged if neither sets a limit."""
    limits = [rows for rows in (ceiling(s).knee_rows,) if rows]
    memory = s.hardware.memory * s.devices
    cache = kv_bytes_held(s.shape, s.context, s.kv_bits)
    if memory and cache:
        limits.append(int((memory - model_bytes(s.shape, s.precision)) / cache))
    return replace(s, batch=max(s.batch, min(limits))) if limits else s


def _drafter(tau: float, cost: float, draft_len: int) -> DraftPlan:
    return DraftPlan(tau, cost, draft_len)


_TYPICAL = "typical published τ; measure your own traffic"

LEVERS: tuple[Lever, ...] = (
    Lever("continuous batching, up to the knee", "scheduling", "rows per read", _batch_to_knee,
          note="as many rows as reading leaves time for, if their caches fit", flag="requests that come together"),
    Lever("chunked prefill beside decodes", "scheduling", "none", note="steadies the time between tokens of others"),
    Lever("preemption, fairness, priorities", "scheduling", "none", note="who waits, not how long a step takes"),
    Lever("asynchronous scheduling", "scheduling", "bandwidth", _no_overhead,
          note="removes what a step waits for the host"),
    Lever("8-bit keys and values", "kv cache", "bytes", _kv(8), flag="--kv-cache-dtype int8"),
    Lever("4-bit keys and values", "kv cache", "bytes", _kv(4)),
    Lever("prefix cache", "kv cache", "none", note="saves reading prompts again: time to first token"),
    Lever("paged blocks", "kv cache", "none", note="lets more caches fit: batch, not speed of one"),
    Lever("offloading caches to host or disk", "kv cache", "none", note="saves recomputing after a pause"),
    Lever("fused kernels, graphs", "kernels", "bandwidth", _no_overhead,
          note="removes launches and passes between kernels"),
    Lever("faster arithmetic (tiles, tensor cores) × 2", "kernels", "rows per read", _operations(2),
          note="moves the knee; below it a step waits for memory all the same"),
    Lever("flash attention", "kernels", "none", note="the cache is read once either way; matters for prompts"),
    Lever("fp8 or int8 weights", "precision", "bytes", _weights("int8"), flag="--quantization int8"),
    Lever("4-bit weights", "precision", "bytes", _weights("int4"), flag="--quantization int4"),
    Lever("6-bit weights", "precision", "bytes", _weights("q6_k")),
    Lever("5-bit weights", "precision", "bytes", _weights("q5_k")),
    Lever("3-bit weights", "precision", "bytes", _weights("q3_k")),
    Lever("2-bit weights", "precision", "bytes", _weights("q2_k"), note="rarely worth its loss of quality"),
    Lever("the head in 4 bits", "precision", "bytes", _head(4.5), note="large vocabularies only"),
    Lever("8-bit activations", "precision", "none", note="arithmetic only; one user waits for memory"),
    Lever("tensor parallel × 2", "parallelism", "bandwidth", _devices(2), note="two all-reduces a layer"),
    Lever("tensor parallel × 8", "parallelism", "bandwidth", _devices(8), note="two all-reduces a layer"),
    Lever("pipeline parallel", "parallelism", "none", note="layers of one token still follow one another"),
    Lever("data parallel, replicas behind a router", "parallelism", "none", note="more users, not a faster one"),
    Lever("expert parallel", "parallelism", "none", note="spreads experts over devices at large batches"),
    Lever("prefill apart from decode", "parallelism", "none", note="steadies both; neither gets faster alone"),
    Lever("n-gram and prompt lookup", "speculation", "rows per read", draft=_drafter(1.6, 0.0, 4),
          note="τ 1.6 assumed; code and summaries give more, chat less"),
    Lever("suffix decoding", "speculation", "rows per read", draft=_drafter(2.0, 0.0, 8),
          note="τ 2.0 assumed; far more where answers repeat what was said"),
    Lever("lookahead decoding", "speculation", "rows per read", draft=_drafter(1.63, 0.0, 4), note=_TYPICAL),
    Lever("layer skipping (self-speculation)", "speculation", "rows per read", draft=_drafter(2.2, 0.4, 3),
          note=_TYPICAL),
    Lever("Medusa heads", "speculation", "rows per read", draft=_drafter(2.39, 0.05, 4), note=_TYPICAL),
    Lever("small draft model", "speculation", "rows per read", draft=_drafter(2.8, 0.1, 4), note=_TYPICAL),
    Lever("multi-token prediction heads", "speculation", "rows per read", draft=_drafter(1.85, 0.04, 1),
          note=_TYPICAL),
    Lever("EAGLE-3 chain", "speculation", "rows per read", draft=_drafter(3.4, 0.05, 5), note=_TYPICAL),
    Lever("block drafter (one pass for all tokens)", "speculation", "rows per read", draft=_drafter(4.0, 0.02, 7),
          note=_TYPICAL),
)  # fmt: skip


def _factor(setting: Setting, lever: Lever, rate: Callable[[Ceiling], float]) -> tuple[float, bool | None]:
    before = ceiling(setting)
    if lever.draft is not None:
        plan = report(lever.draft, lambda rows: _verify(setting, rows))
        return max(1.0, plan.speedup), before.fits
    if lever.change is None:
        return 1.0, before.fits
    after = ceiling(lever.change(setting))
    return rate(after) / rate(before), after.fits


def _verify(setting: Setting, rows: int) -> float:
    """A verification of `rows` rows of each of the batch's sequences over a step without drafts."""
    if setting.batch == 1:
        return verify_cost(setting, rows)
    wide = ceiling(replace(setting, batch=setting.batch * rows))
    return wide.time.seconds / ceiling(setting).time.seconds


def predict(setting: Setting, lever: Lever) -> Gain:
    """What a lever brings one user (batch 1) and everybody together (at the setting's batch)."""
    alone = replace(setting, batch=1)
    if lever.name.startswith("continuous batching"):
        one, fits = 1.0, ceiling(lever.change(setting) if lever.change else setting).fits
    else:
        one, fits = _factor(alone, lever, lambda c: c.tok_s)
    total, _ = _factor(setting, lever, lambda c: c.total_tok_s)
    return Gain(lever.name, lever.layer, lever.term, one, total, lever.note, lever.flag, fits)


def levers(setting: Setting, own: tuple[Lever, ...] = ()) -> list[Gain]:
    """All gains: by the term they touch, the largest for one user first; what does not help one user comes last."""
    gains = [predict(setting, lever) for lever in (*LEVERS, *own)]
    return sorted(gains, key=lambda g: (not g.helps_one_user, TERMS.index(g.term), -g.one_user, -g.throughput))


def by_layer(setting: Setting) -> dict[Layer, Gain]:
    """The best lever of each of the six layers: for one user, then for throughput."""
    gains = levers(setting)
    return {
        layer: max((g for g in gains if g.layer == layer), key=lambda g: (round(g.one_user, 3), g.throughput))
        for layer in LAYERS
    }


def parse_own(text: str) -> Lever:
    """An optimisation of the user's own: "name: bytes=0.5,kv=0.5,bandwidth=1.2,operations=2,tau=3,c=0.1,k=4".

    The factors apply to weight bits, cache bits, bandwidth and peak arithmetic. Raises UsageError.
    """
    name, _, terms = text.partition(":")
    values: dict[str, float] = {}
    for part in terms.split(","):
        key, _, value = part.strip().partition("=")
        try:
            values[key] = float(value)
        except ValueError:
            values = {}
            break
    known = {"bytes", "kv", "bandwidth", "operations", "tau", "c", "k"}
    if not values or not values.keys() <= known or any(not 0 <= v <= 1e6 for v in values.values()):
        raise UsageError(f'--own takes "name: bytes=0.5,bandwidth=1.2" with {", ".join(sorted(known))}, not {text!r}')
    if any(values.get(key, 1) == 0 for key in ("bytes", "bandwidth", "operations")):
        raise UsageError("--own: a factor must be positive")
    if "tau" in values:
        plan = DraftPlan.parse(f"tau={values['tau']},c={values.get('c', 0)},k={values.get('k', 4)}")
        return Lever(name.strip(), "speculation", "rows per read", draft=plan, note="your own")

    def change(s: Setting) -> Setting:
        precision = replace(
            s.precision,
            bits=s.precision.bits * values.get("bytes", 1),
            head_bits=s.precision.head * values.get("bytes", 1),
        )
        s = replace(s, precision=precision, kv_bits=s.kv_bits * values.get("kv", 1))
        return _operations(values.get("operations", 1))(_bandwidth(values.get("bandwidth", 1))(s))

    term: Term = (
        "bytes" if {"bytes", "kv"} & values.keys() else "bandwidth" if "bandwidth" in values else "rows per read"
    )
    layer: Layer = "precision" if term == "bytes" else "kernels"
    return Lever(name.strip(), layer, term, change, note="your own")
