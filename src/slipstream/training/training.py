"""A training from beginning to end: what is learned from, how large and how long, and what is left when it is done."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream.engine import LoadOptions, Model, load_model
from slipstream.engine.cost import cost_model
from slipstream.errors import UsageError
from slipstream.program import StepShape
from slipstream.roofline.cost import CostModel
from slipstream.roofline.speculation import speedup
from slipstream.speculation.card import Card, fingerprint_of, write_card
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
)
from slipstream.training.export import Layout
from slipstream.training.features import FeatureSource
from slipstream.training.kinds import KINDS, Kind, Wanted
from slipstream.training.parallel import Parallel
from slipstream.training.records import Record
from slipstream.training.resources import Meter, keep_memory_small
from slipstream.training.sizes import draft_vocabulary
from slipstream.training.target import TargetParts
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
PASS_OVER_BYTES = 1.4
"""What a draft pass takes beside its share of the bytes, the host's work included, as measured."""
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


@dataclass(frozen=True, slots=True)
class Prepared:
    """The target and what is learned from."""

    checkpoint: Checkpoint
    reference: str
    fingerprint: str
    parts: TargetParts
    own: Split
    generic: list[Example]
    tokens: npt.NDArray[np.int32]
    left_out: dict[str, int]


def prepare(reference: str, own: Iterable[Record], generic: Iterable[Record], options: TrainOptions) -> Prepared:
    """Read the target and choose from the records. Raises UsageError where there is too little to learn from."""
    checkpoint = open_checkpoint(resolve(reference))
    parts = TargetParts.of(checkpoint)
    fingerprint = fingerprint_of(parts.config, checkpoint)
    examples, left_out = examples_of(own, fingerprint, options.max_len)
    if not examples and (foreign := left_out["another target's"]):
        raise UsageError(f"all {foreign} records are another model's answers: import them with --regenerate")
    chosen = split(examples, options.held_out)
    others = apart_from(examples_of(generic, fingerprint, options.max_len)[0], chosen.held_out)
    tokenizer = load_tokenizer(checkpoint)
    always = [*tokenizer.eos, *tokenizer.special.values()]
    tokens = draft_vocabulary(chosen.train, options.draft_vocabulary, parts.config.vocabulary, always)
    return Prepared(checkpoint, reference, fingerprint, parts, chosen, others, tokens, left_out)


def train(
    prepared: Prepared, options: TrainOptions, folder: Path, progress: Callable[[Progress, float], None] | None = None
) -> dict[str, Any]:
    """Train into `folder`, which then holds a drafter, its cards and curves; returns the training card.

    A folder in which the same training was stopped is gone on with. `progress` is told where the training is, and the S
    that the drafter should have by now.
    """
    keep_memory_small()
    meter, parallel = Meter(), Parallel.start()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    learned = [*prepared.own.train, *prepared.generic]
    size = sum(len(tensor.data) for tensor in prepared.checkpoint.tensors.values())
    wanted = Wanted(prepared.parts, size, prepared.tokens, learned, options.schedule.seed, options.taps, options.layers)
    kind: Kind = KINDS[options.kind](wanted)
    if options.start_from is not None:
        kind.continue_from(options.start_from)
    layers = (*kind.taps, prepared.parts.config.layers)
    model = _features_model(prepared, options, layers)
    source = FeatureSource(model, layers)
    tap_width = len(kind.taps) * prepared.parts.config.hidden
    held = _held_items(source, prepared.own.held_out)

    def trainer(schedule: Schedule, fresh: Kind, at: Path) -> Trainer:
        order = in_order(prepared.own.train, prepared.generic, options.generic_share, schedule.seed)
        mine = (parallel.rank, parallel.processes)
        ring = Ring(source, order, schedule.round_tokens, schedule.uses, schedule.seed, mine)
        return Trainer(fresh.objective, ring, held, schedule, at, _name(prepared, options), tap_width, parallel)

    schedule = _planned(prepared, options, folder, kind, trainer, first=not parallel.rank)
    schedule = replace(schedule, rounds=parallel.of_the_first(schedule.rounds))
    running = trainer(schedule, kind, folder)
    foresee = Foresight(cost_model(model, quick=True), kind.share)

    def show(at: Progress) -> None:
        if progress is not None:
            progress(at, foresee.speedup(at.curve.acceptance[-1]))

    curve = running.run(show)
    card = _card(prepared, options, schedule, kind, curve, meter, source, resumed=running.resumed)
    card["speedup_estimate"] = foresee.speedup(curve.acceptance[-1])
    if not parallel.rank:
        kind.write(folder, options.layout, prepared.reference, options.max_len)
        write_card(folder, Card(prepared.fingerprint, curve.tau[-1], schedule.draft_len, prepared.reference))
        (folder / CARD).write_text(json.dumps(card, indent=1) + "\n")
        write_curves(folder / CURVES, curve)
        for name in (STATE, PLAN):
            (folder / name).unlink(missing_ok=True)
    parallel.end()
    return card


@dataclass(frozen=True, slots=True)
class Foresight:
    """What S a drafter should have that reads `share` of the target's bytes."""

    cost: CostModel
    share: float

    def speedup(self, acceptance: Sequence[float]) -> float:
        """At the best draft length, given acceptance by position."""

        def step(rows: int) -> float:
            return self.cost.seconds(StepShape(rows, rows, 0, rows * CONTEXT))

        best, tau, alive = 1.0, 1.0, 1.0
        for length, chance in enumerate(acceptance, 1):
            alive *= chance
            tau += alive
            verify, each = step(length + 1) / step(1), PASS_OVER_BYTES * self.share
            best = max(best, speedup(tau, length, lambda n, v=verify: v, lambda k, c=each: k * c))  # type: ignore[misc]
        return best


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
    plan, schedule, name = folder / PLAN, options.schedule, _name(prepared, options)
    wanted: dict[str, Any] = {"name": name, "seconds": options.seconds, "rounds": options.rounds}
    if plan.is_file():
        known = json.loads(plan.read_text())
        if {key: known.get(key) for key in wanted} != wanted:
            raise UsageError(
                f"another training was stopped in {folder} (of other traffic, or with other settings): go on with that "
                f"one, or delete {plan} to begin anew"
            )
        return replace(schedule, rounds=int(known["planned"]))
    rounds = options.rounds or _affordable(options, folder, kind, trainer)
    if not first:
        return replace(schedule, rounds=rounds)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE).unlink(missing_ok=True)
    scratch = folder / ".plan.json"
    scratch.write_text(json.dumps(wanted | {"planned": rounds, "until": _newest(prepared)}))
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
    wanted = LoadOptions(max_len=longest, threads=options.threads, sequences=LANES, taps=layers)
    return load_model(prepared.reference, wanted)


def _held_items(source: FeatureSource, held_out: Sequence[Example]) -> list[Item]:
    every = max(1, len(held_out) // CHECKED)
    chosen = held_out[::every][:CHECKED]
    states = source.compute([example.tokens for example in chosen])
    return [Item(e, torch.from_numpy(s).to(torch.bfloat16)) for e, s in zip(chosen, states, strict=True)]


def _name(prepared: Prepared, options: TrainOptions) -> str:
    """Names what is trained on what: everything but the schedule that decides the weights."""
    parts = (
        options.kind, prepared.fingerprint, data_fingerprint(prepared.own.train), data_fingerprint(prepared.generic),
        options.generic_share, len(prepared.tokens), str(options.start_from or ""), options.taps or "",
        options.layers or "",
    )  # fmt: skip
    return " ".join(map(str, parts))


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
        "data_fingerprint": data_fingerprint(train),
        "generic_fingerprint": data_fingerprint(prepared.generic) if prepared.generic else None,
        "answers": len(train),
        "answer_tokens": sum(example.answered for example in train),
        "held_out_answers": len(prepared.own.held_out),
        "held_out_since": prepared.own.held_out[0].time,
        "newest": _newest(prepared),
        "left_out": prepared.left_out,
        "tags": sorted({example.tag for example in train}),
        "tokens_seen": curve.tokens[-1],
        "taps": list(kind.taps),
        "draft_vocabulary": len(prepared.tokens),
        "draft_vocabulary_covers": coverage(prepared.own.held_out, prepared.tokens),
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
