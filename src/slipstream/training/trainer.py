"""Trainer: rounds of learning with a state on disk from which a killed training goes on, to the same weights."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from slipstream.errors import SlipstreamError, UsageError
from slipstream.training.batches import Batch, Entry, Item, Ring, batches_of
from slipstream.training.objectives import Agreement, Objective
from slipstream.training.parallel import Parallel
from slipstream.training.resources import Meter

STATE = "state.training"
"""Safetensors, under a name by which nobody takes it for a drafter."""
SAVE_EVERY = 60.0
"""Seconds between two states on disk."""
WARM_UP, LEAST_RATE, CLIP = 0.04, 0.03, 1.0
"""Share of the steps in which the learning rate rises; what it falls to; longest gradient."""
BETAS = (0.9, 0.95)
CHECKED_TOGETHER = 8


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long is trained and how. A `round_tokens` of examples makes a round, learned from `uses` times."""

    rounds: int
    round_tokens: int = 16384
    batch_tokens: int = 512
    uses: int = 2
    learning_rate: float = 1.5e-3
    seed: int = 0
    draft_len: int = 5
    """Tokens of the chains by which held-out answers are judged."""


@dataclass
class Curve:
    """Points of a training: tokens of answers seen, seconds, loss, tau of held-out answers, acceptance by position."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    tau: list[float] = field(default_factory=list)
    acceptance: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a training is."""

    round: int
    rounds: int
    curve: Curve
    seconds_left: float


class Trainer:
    """Trains an objective's module. Everything that decides the weights is in the schedule, the examples and `name`."""

    def __init__(
        self,
        objective: Objective,
        ring: Ring,
        held_out: Sequence[Item],
        schedule: Schedule,
        folder: Path,
        name: str,
        tap_width: int,
        parallel: Parallel | None = None,
        meter: Meter | None = None,
    ):
        """`folder` keeps the state. `name` says what is trained on what: only its own state is gone on with, and then
        `meter` goes on, too.
        """
        self.objective, self.ring, self.schedule, self.folder = objective, ring, schedule, folder
        self._held_out, self._tap_width, self._parallel = held_out, tap_width, parallel or Parallel()
        self._meter = meter or Meter()
        self._name = json.dumps({"name": name, **asdict(schedule)}, sort_keys=True)
        self.curve = Curve()
        self.round = self._step = 0
        self._seconds, self._saved = 0.0, 0.0
        self._optimizer = torch.optim.AdamW(
            objective.module.parameters(), schedule.learning_rate, BETAS, weight_decay=0.0, fused=True
        )
        self.resumed = self._load()

    @property
    def _steps(self) -> int:
        """Steps of the whole training, near enough for the learning rate."""
        s = self.schedule
        return max(1, s.rounds * s.uses * math.ceil(s.round_tokens / s.batch_tokens))

    def run(self, progress: Callable[[Progress], None] | None = None) -> Curve:
        """Train to the end. Raises SlipstreamError if the loss is no number any more."""
        begun = time.perf_counter() - self._seconds
        self._saved = time.perf_counter()
        if not self.curve.tau:
            self._check(math.nan, 0.0)
        check_every = max(1, self.schedule.rounds // 24)
        while self.round < self.schedule.rounds:
            loss = self._round()
            self.round += 1
            self._seconds = time.perf_counter() - begun
            if self.round % check_every == 0 or self.round == self.schedule.rounds:
                self._check(loss, self._seconds)
            if time.perf_counter() - self._saved > SAVE_EVERY or self.round == self.schedule.rounds:
                self._save()
            if progress is not None:
                left = self._seconds / self.round * (self.schedule.rounds - self.round)
                progress(Progress(self.round, self.schedule.rounds, self.curve, left))
        return self.curve

    def practice(self, rounds: int) -> float:
        """Run some rounds, of which nothing is kept but the weights; returns the seconds of one like the last.

        Of two, the faster one counts: this process may have been stopped during the other.
        """
        seconds = []
        for _ in range(rounds + 1):
            begun = time.perf_counter()
            self._round()
            seconds.append(time.perf_counter() - begun)
        return min(seconds[-2:])

    def _round(self) -> float:
        """Learn from a round; returns the mean loss."""
        total = weight = 0.0
        for entries in batches_of(self.ring.round(), self.schedule.batch_tokens):
            loss, count = self._learn(entries)
            total, weight = total + loss, weight + count
        if not math.isfinite(total):
            raise SlipstreamError("the loss is no number any more: lower --learning-rate")
        return total / max(weight, 1.0)

    def _learn(self, entries: Sequence[Entry]) -> tuple[float, int]:
        items = [item for _, item in entries if item is not None]
        self._optimizer.zero_grad()
        loss, count = torch.zeros(()), 0
        if items:
            loss, count = self.objective.loss(Batch.of(items, self._tap_width), self._step)
        whole = self._parallel.total(count)
        if not whole:
            return 0.0, 0
        if items:
            (loss / whole).backward()  # type: ignore[no-untyped-call]
        parameters = list(self.objective.module.parameters())
        self._parallel.add_up(parameters)
        nn.utils.clip_grad_norm_(parameters, CLIP)
        for group in self._optimizer.param_groups:
            group["lr"] = self.schedule.learning_rate * self._rate()
        self._optimizer.step()
        self._step += 1
        return self._parallel.total(loss.item()), whole

    def _rate(self) -> float:
        done = self._step / self._steps
        return max(LEAST_RATE, min((self._step + 1) / (WARM_UP * self._steps + 1), 1.0 - done))

    def _check(self, loss: float, seconds: float) -> None:
        found = Agreement()
        for first in range(0, len(self._held_out), CHECKED_TOGETHER):
            batch = Batch.of(self._held_out[first : first + CHECKED_TOGETHER], self._tap_width)
            found.merge(self.objective.agreement(batch, self.schedule.draft_len))
        curve = self.curve
        curve.tokens.append(self.ring.tokens)
        curve.seconds.append(seconds)
        curve.loss.append(loss)
        curve.tau.append(found.tau)
        curve.acceptance.append(found.conditional())

    def _save(self) -> None:
        """Everything in one file, which is there whole or not at all."""
        self._saved = time.perf_counter()
        if self._parallel.rank:
            return
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.objective.module.named_parameters():
            state = self._optimizer.state[parameter]
            tensors[f"weight.{name}"] = parameter.detach()
            tensors[f"mean.{name}"], tensors[f"square.{name}"] = state["exp_avg"], state["exp_avg_sq"]
        about = {
            "round": self.round, "step": self._step, "seconds": self._seconds, "curve": asdict(self.curve),
            "spent": self._meter.report(),
        }  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        scratch = self.folder / f".{STATE}"
        save_file(tensors, scratch, {"name": self._name, "about": json.dumps(about)})
        self._meter.look_at(self.folder)
        os.replace(scratch, self.folder / STATE)

    def _load(self) -> bool:
        """Go on from the state on disk, if it is this training's."""
        path = self.folder / STATE
        if not path.is_file():
            return False
        with safe_open(path, "pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("name") != self._name:
                raise UsageError(f"{path} is the state of another training: delete it to begin anew")
            about: dict[str, Any] = json.loads(metadata["about"])
            for name, parameter in self.objective.module.named_parameters():
                read: Callable[[str], Tensor] = file.get_tensor
                with torch.no_grad():
                    parameter.copy_(read(f"weight.{name}"))
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(about["step"])), "exp_avg": read(f"mean.{name}"),
                    "exp_avg_sq": read(f"square.{name}"),
                }  # fmt: skip
        self.round, self._step, self._seconds = about["round"], about["step"], about["seconds"]
        self.curve = Curve(**about["curve"])
        self._meter.go_on_from(about["spent"])
        self.ring.skip(self.round)
        return True
