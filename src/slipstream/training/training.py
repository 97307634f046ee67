"""A training from beginning to end: what is learned from, how large and how long, and what is left when it is done."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from slipstream.engine import LoadOptions, Model, load_model
from slipstream.engine.cost import cost_model
from slipstream.engine.model import Quantization
from slipstream.errors import UsageError
from slipstream.program import KVFormat, StepShape
from slipstream.roofline.cost import CostModel
from slipstream.speculation.card import Card, fingerprint_of, write_card
from slipstream.speculation.eagle3_model import default_taps
from slipstream.text import load_tokenizer
from slipstream.training.batches import GAP, Item, Ring
from slipstream.training.curves import write_curves
from slipstream.training.dataset import (
    Example,
    Split,
    apart_from,
    coverage,
    data_fingerprint,
    examples_of,
    in_order,
    split,
    told,
)
from slipstream.training.export import Layout
from slipstream.training.features import FeatureSource
from slipstream.training.kinds import KINDS, Kind, Wanted, shape_in
from slipstream.training.parallel import Parallel
from slipstream.training.records import Record, target_of
from slipstream.training.resources import Meter, keep_memory_small
from slipstream.training.sizes import DSPARK_BLOCK, Head, candidates, heads, taps_for
from slipstream.training.sizing import PRIORS, Choice, Costs, Lesson, Shape, choose
from slipstream.training.target import TargetParts, bytes_served
from slipstream.training.trainer import STATE, Curve, Progress, Schedule, Trainer
from slipstream.weights import Checkpoint
from slipstream.weights.open import open_checkpoint
from slipstream.weights.references import resolve

CARD = "training-card.json"
CURVES = "training-curves.svg"
PLAN = "plan.json"
CHECKED = 48
"""Held-out answers by which tau is estimated while training goes on."""
LANES = 16
"""Sequences whose features are computed together."""
TRIAL = 4
"""Rounds of a quarter of the size are run, and forgotten, to see how many whole ones fit into the budget."""
CONTEXT = 256
"""Tokens of context at which S is foreseen."""
CHUNK = 256
"""Rows of the target's steps by which the time of a training is foreseen."""
MOST_TOKENS = 8_000_000
"""Tokens of answers that are read: more than a day's training comes to see, and a gigabyte as Python has them."""
SPARE = 0.94
"""Share of the budget that is planned with: machines have moods, and states have to be written."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What is wanted. With `rounds` the weights are the same at every run; with `seconds` so many rounds as fit."""

    kind: str = "eagle3"
    seconds: float | None = 1200.0
    rounds: int | None = None
    schedule: Schedule = field(default_factory=lambda: Schedule(1))
    draft_vocabulary: int | None = None
    held_out: float = 0.1
    generic_share: float = 0.1
    max_len: int = 1024
    layout: Layout = "eagle3"
    start_from: Path | None = None
    threads: int | None = None
    taps: tuple[int, ...] = ()
    layers: int | None = None
    kv_format: KVFormat = KVFormat.BF16
    quantization: Quantization = "none"
    """How the target is served, so that what is learned from are serving's own numbers."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The target and what is learned from."""

    checkpoint: Checkpoint
    reference: str
    fingerprint: str
    parts: TargetParts
    own: Split
    generic: list[Example]
    heads: list[Head]
    """That the drafter may have."""
    left_out: dict[str, int]
    generic_left_out: dict[str, int]
    """Of either: why, and how many."""

    def unusual_taps(self, wanted: tuple[int, ...]) -> bool:
        """Whether a drafter would read other layers than the paper's."""
        layers = self.parts.config.layers
        return taps_for(layers, wanted) != default_taps(layers)


def prepare(reference: str, own: Iterable[Record], generic: Iterable[Record], options: TrainOptions) -> Prepared:
    """Read the target and choose from the records. Raises UsageError where there is too little to learn from."""
    checkpoint = open_checkpoint(resolve(reference))
    parts = TargetParts.of(checkpoint)
    fingerprint = fingerprint_of(parts.config, checkpoint)
    target = target_of(fingerprint, options.kv_format, options.quantization)
    examples, left_out = examples_of(own, target, options.max_len)
    if not examples and any(left_out.values()):
        raise UsageError(f"there is nothing to learn from: {told(left_out)}")
    chosen = split(examples, options.held_out)
    mixed, generic_left_out = examples_of(generic, target, options.max_len)
    if not mixed and any(generic_left_out.values()):
        raise UsageError(f"none of the generic records can be mixed in: {told(generic_left_out)}")
    others = apart_from(mixed, chosen.held_out)
    tokenizer = load_tokenizer(checkpoint)
    always = [*tokenizer.eos, *tokenizer.special.values()]
    known = heads(chosen.train, options.draft_vocabulary, parts.config.vocabulary, always)
    return Prepared(checkpoint, reference, fingerprint, parts, chosen, others, known, left_out, generic_left_out)


def train(
    prepared: Prepared,
    options: TrainOptions,
    folder: Path,
    progress: Callable[[Progress, float], None] | None = None,
    chose: Callable[[Choice], None] | None = None,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train into `folder`, which then holds a drafter, its cards and curves; returns the training card.

    A folder in which the same training was stopped is gone on with. `progress` is told where the training is, and the S
    that the drafter should have by now; `chose` first of its size. `about`, how it was asked for, goes into its card.
    """
    keep_memory_small()
    meter, parallel = Meter(), Parallel.start()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    learned = [*prepared.own.train, *prepared.generic]
    size = bytes_served(prepared.parts.config, prepared.checkpoint, options.quantization)
    layers = (*taps_for(prepared.parts.config.layers, options.taps), prepared.parts.config.layers)
    model = _features_model(prepared, options, layers)
    cost = cost_model(model, quick=True)
    costs = Costs(lambda n: _step(cost, n), cost.drafted, size, DSPARK_BLOCK if options.kind == "dspark" else 0)
    choice = _sized(prepared, options, folder, costs, _lesson(prepared, options, cost), parallel)
    if chose is not None:
        chose(choice)
    shape = choice.chosen.candidate.shape
    tokens = next(head.tokens for head in prepared.heads if len(head.tokens) == shape.vocabulary)
    wanted = Wanted(
        prepared.parts, size, tokens, learned, options.schedule.seed, options.taps, shape.layers, shape.ffn
    )  # fmt: skip
    kind: Kind = KINDS[options.kind](wanted)
    if options.start_from is not None:
        kind.continue_from(options.start_from)
    source = FeatureSource(model, layers)
    tap_width = len(kind.taps) * prepared.parts.config.hidden
    held = _held_items(source, prepared.own.held_out)

    def trainer(schedule: Schedule, fresh: Kind, at: Path, meter: Meter | None = None) -> Trainer:
        order = in_order(prepared.own.train, prepared.generic, options.generic_share, schedule.seed)
        mine = (parallel.rank, parallel.processes)
        ring = Ring(source, order, schedule.round_tokens, schedule.uses, schedule.seed, mine)
        return Trainer(fresh.objective, ring, held, schedule, at, _name(prepared, options), tap_width, parallel, meter)

    schedule = _planned(prepared, options, folder, kind, trainer, first=not parallel.rank)
    schedule = replace(schedule, rounds=parallel.of_the_first(schedule.rounds))
    running = trainer(schedule, kind, folder, meter)
    drafting = choice.chosen.candidate.bytes

    def show(at: Progress) -> None:
        if progress is not None:
            progress(at, costs.best_speedup(at.curve.acceptance[-1], drafting))

    curve = running.run(show)
    if not parallel.rank:
        kind.write(folder, options.layout, prepared.reference, options.max_len)
        write_card(folder, Card(prepared.fingerprint, curve.tau[-1], schedule.draft_len, prepared.reference))
        write_curves(folder / CURVES, curve)
        meter.look_at(folder)
    made = _card(prepared, options, schedule, kind, curve, meter, source, resumed=running.resumed)
    card = dict(about or {}) | made
    card["speedup_estimate"] = costs.best_speedup(curve.acceptance[-1], drafting)
    card["sizes"] = choice.table()
    if not parallel.rank:
        (folder / CARD).write_text(json.dumps(card, indent=1) + "\n")
        for name in (STATE, PLAN):
            (folder / name).unlink(missing_ok=True)
    parallel.end()
    return card


def _step(cost: CostModel, rows: int) -> float:
    """Seconds of a step that verifies, for one user."""
    return cost.seconds(StepShape(rows, rows, 0, rows * CONTEXT))


def _sized(
    prepared: Prepared, options: TrainOptions, folder: Path, costs: Costs, lesson: Lesson, parallel: Parallel
) -> Choice:
    """The shape: a stopped training's, that of the drafter to begin with, or what should bring most."""
    layers, ffn = options.layers, None
    if options.start_from is not None:
        begun, ffn = shape_in(options.start_from, options.kind, prepared.parts.config)
        layers = layers or begun
    known = candidates(
        options.kind, prepared.parts.config, costs.target_bytes, prepared.heads, layers, ffn, options.taps
    )  # fmt: skip
    choice = choose(known, costs, PRIORS[options.kind], lesson, options.schedule.draft_len)
    shape = choice.chosen.candidate.shape
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        shape = Shape(*json.loads((folder / PLAN).read_text())["shape"])
    shapes = [one.shape for one in known]
    at = parallel.of_the_first(shapes.index(shape if shape in shapes else choice.chosen.candidate.shape))
    return replace(choice, chosen=next(one for one in choice.ranked if one.candidate.shape == shapes[at]))


def _lesson(prepared: Prepared, options: TrainOptions, cost: CostModel) -> Lesson:
    """What there is to learn from."""
    train, rounds = prepared.own.train, options.rounds
    answered = sum(example.answered for example in train)
    whole = sum(len(example.tokens) for example in train)
    if rounds is not None:
        return Lesson(answered * min(1.0, rounds * options.schedule.round_tokens / whole))
    chunk = cost.seconds(StepShape(CHUNK, 0, 0, CHUNK * CONTEXT))
    return Lesson(answered, options.seconds, chunk / CHUNK * whole / answered)


def _planned(
    prepared: Prepared,
    options: TrainOptions,
    folder: Path,
    kind: Kind,
    trainer: Callable[[Schedule, Kind, Path], Trainer],
    *,
    first: bool,
) -> Schedule:
    """The schedule: as many rounds as were wanted, as a stopped training had planned, or as the budget allows.

    Of several processes the first one's counts, and is written down.
    """
    plan, schedule = folder / PLAN, options.schedule
    wanted: dict[str, Any] = {**_parts(prepared, options), "seconds": options.seconds, "rounds": options.rounds}
    if plan.is_file():
        known = json.loads(plan.read_text())
        if changed := [key for key in wanted if known.get(key) != wanted[key]]:
            gone = "answers it learned from were deleted, or made room: bounds of --record"
            raise UsageError(
                f"another training was stopped in {folder}, with other {', '.join(changed)}"
                f"{f' ({gone})' if 'traffic' in changed else ''}: go on with that one, or delete {plan} to begin anew"
            )
        return replace(schedule, rounds=int(known["planned"]))
    rounds = options.rounds or _affordable(options, folder, kind, trainer)
    if not first:
        return replace(schedule, rounds=rounds)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE).unlink(missing_ok=True)
    scratch = folder / ".plan.json"
    shape = astuple(kind.wanted.shape)
    scratch.write_text(json.dumps(wanted | {"planned": rounds, "until": _newest(prepared), "shape": shape}))
    os.replace(scratch, plan)
    return replace(schedule, rounds=rounds)


def _affordable(
    options: TrainOptions, folder: Path, kind: Kind, trainer: Callable[[Schedule, Kind, Path], Trainer]
) -> int:
    """Rounds that the budget allows."""
    assert options.seconds is not None
    schedule = options.schedule
    full = GAP * (schedule.uses - 1) + 2  # then a round is used as often as later ones are
    small = replace(schedule, rounds=full, round_tokens=max(1, schedule.round_tokens // TRIAL))
    each = TRIAL * trainer(small, kind.fresh(), folder / "never").practice(full)
    return max(2, math.floor(SPARE * options.seconds / each))


def _newest(prepared: Prepared) -> float:
    """The time of the newest answer."""
    return max(example.time for example in (*prepared.own.held_out, *prepared.generic))


def read_until(folder: Path) -> float | None:
    """Where a training was stopped in a folder, the time before which answers are to be read for it: others have come
    since. None where there is none.
    """
    try:
        return math.nextafter(float(json.loads((folder / PLAN).read_text())["until"]), math.inf)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def newest_within(records: int, tokens: int) -> int | None:
    """How many records are read, the newest ones, so that memory is bounded; None: all."""
    return int(records * MOST_TOKENS / tokens) if tokens > MOST_TOKENS else None


def _features_model(prepared: Prepared, options: TrainOptions, layers: tuple[int, ...]) -> Model:
    longest = min(options.max_len, prepared.parts.config.context)
    wanted = LoadOptions(
        max_len=longest, kv_format=options.kv_format, quantization=options.quantization, threads=options.threads,
        sequences=LANES, taps=layers,
    )  # fmt: skip
    return load_model(prepared.reference, wanted)


def _held_items(source: FeatureSource, held_out: Sequence[Example]) -> list[Item]:
    every = max(1, len(held_out) // CHECKED)
    chosen = held_out[::every][:CHECKED]
    states = source.compute([example.tokens for example in chosen])
    return [Item(e, torch.from_numpy(s).to(torch.bfloat16)) for e, s in zip(chosen, states, strict=True)]


def _name(prepared: Prepared, options: TrainOptions) -> str:
    """Names what is trained on what."""
    return " ".join(_parts(prepared, options).values())


def _parts(prepared: Prepared, options: TrainOptions) -> dict[str, str]:
    """Everything but the schedule that decides the weights."""
    parts = {
        "kind": options.kind, "target": prepared.fingerprint, "traffic": data_fingerprint(prepared.own.train),
        "generic traffic": data_fingerprint(prepared.generic), "generic share": options.generic_share,
        "head": options.draft_vocabulary, "beginning": options.start_from or "", "taps": options.taps or "",
        "layers": options.layers or "", "cache": options.kv_format, "weights": options.quantization,
    }  # fmt: skip
    return {name: str(value) for name, value in parts.items()}


def _card(
    prepared: Prepared,
    options: TrainOptions,
    schedule: Schedule,
    kind: Kind,
    curve: Curve,
    meter: Meter,
    source: FeatureSource,
    *,
    resumed: bool,
) -> dict[str, Any]:
    train = prepared.own.train
    return {
        "kind": options.kind,
        "target": prepared.reference,
        "target_fingerprint": prepared.fingerprint,
        "kv_cache_dtype": options.kv_format.value,
        "quantization": options.quantization,
        "data_fingerprint": data_fingerprint(train),
        "generic_fingerprint": data_fingerprint(prepared.generic) if prepared.generic else None,
        "answers": len(train),
        "answer_tokens": sum(example.answered for example in train),
        "held_out_answers": len(prepared.own.held_out),
        "checked_answers": min(CHECKED, len(prepared.own.held_out)),
        "held_out_since": prepared.own.held_out[0].time,
        "newest": _newest(prepared),
        "left_out": prepared.left_out,
        "generic_left_out": prepared.generic_left_out,
        "tags": sorted({example.tag for example in train}),
        "tokens_seen": curve.tokens[-1],
        "taps": list(kind.taps),
        "draft_vocabulary": len(kind.wanted.tokens),
        "draft_vocabulary_covers": coverage(prepared.own.held_out, kind.wanted.tokens),
        "parameters": kind.parameters,
        "share_of_the_targets_bytes": kind.share,
        "schedule": asdict(schedule),
        "features_computed": source.computed,
        "minutes": curve.seconds[-1] / 60.0,
        "resumed": resumed,
        **meter.report(),
        "tau_estimate": curve.tau[-1],
        "acceptance_by_position": curve.acceptance[-1],
        "curve": asdict(curve) | {"loss": [loss if math.isfinite(loss) else None for loss in curve.loss]},
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
