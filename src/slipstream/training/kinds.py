"""Kinds: what can be trained. Each knows its module, its objective, and how it is written down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from slipstream.errors import UsageError
from slipstream.speculation.checkpoint import family_of
from slipstream.speculation.dspark_model import dspark_weights, read_dspark
from slipstream.speculation.eagle3_model import eagle3_weights, read_eagle3
from slipstream.training.dataset import Example
from slipstream.training.dspark_objective import DSparkObjective
from slipstream.training.export import Layout, write_dspark, write_eagle3
from slipstream.training.modules.dspark import DSpark
from slipstream.training.modules.eagle3 import Eagle3
from slipstream.training.objectives import Eagle3Objective, Objective
from slipstream.training.sizes import (
    BYTES_A_WEIGHT,
    dspark_config,
    dspark_parameters,
    eagle3_config,
    eagle3_parameters,
    mask_token_of,
)
from slipstream.training.target import TargetParts
from slipstream.training.trainer import Schedule
from slipstream.weights import Checkpoint
from slipstream.weights.open import open_checkpoint

UNROLL, DECAY = 5, 0.8
"""Steps of the training-time test, and what each counts beside the one before."""


class Kind(Protocol):
    """A drafter in training. `taps` are the target's layers whose inputs it reads."""

    taps: tuple[int, ...]
    parameters: int
    share: float
    """Of the target's bytes, when it drafts."""

    @property
    def objective(self) -> Objective:
        """What it is asked."""

    def fresh(self) -> Kind:
        """Another one of the same beginning."""

    def continue_from(self, folder: Path) -> None:
        """Begin with the weights of a drafter in a folder. Raises UsageError where it has another shape."""

    def write(self, folder: Path, layout: Layout, target: str, context: int) -> None:
        """The drafter as others can load it."""


class Eagle3Kind:
    """An EAGLE-3 drafter of one layer."""

    def __init__(self, target: TargetParts, tokens: npt.NDArray[np.int32], target_bytes: int, schedule: Schedule):
        self._arguments = (target, tokens, target_bytes, schedule)
        self._tokens = tokens
        self.config = eagle3_config(target.config, len(tokens), target_bytes)
        self.taps = self.config.taps
        self.parameters = eagle3_parameters(self.config)
        self.share = BYTES_A_WEIGHT * self.parameters / target_bytes
        ids = torch.from_numpy(tokens.astype(np.int64))
        self.module = Eagle3(self.config)
        self.module.start_from(target, ids, torch.Generator().manual_seed(schedule.seed))
        self.objective = Eagle3Objective(self.module, target, ids, UNROLL, DECAY, schedule.seed)

    def fresh(self) -> Eagle3Kind:
        """Another one of the same beginning."""
        other = Eagle3Kind(*self._arguments)
        other.module.load_state_dict(self.module.state_dict())
        return other

    def continue_from(self, folder: Path) -> None:
        """Take the weights of another EAGLE-3 drafter; rows of its head go by their tokens."""
        checkpoint = open_checkpoint(folder)
        if family_of(checkpoint) != "eagle3":
            raise UsageError(f"{folder} holds no EAGLE-3 drafter to begin with")
        theirs = read_eagle3(checkpoint, max(self.taps) + 3, self.config.tap_width)
        _, known = eagle3_weights(theirs, checkpoint, None)
        _take(self.module, checkpoint, self._tokens, known, ("lm_head.weight",))

    def write(self, folder: Path, layout: Layout, target: str, context: int) -> None:
        """The drafter as others can load it."""
        weights: dict[str, torch.Tensor] = dict(self.module.named_parameters())
        layers = self._arguments[0].config.layers
        write_eagle3(folder, self.config, weights, self._tokens, layout, target, layers, context)


class DSparkKind:
    """A DSpark drafter."""

    def __init__(
        self, target: TargetParts, tokens: npt.NDArray[np.int32], target_bytes: int, schedule: Schedule, mask_token: int
    ):
        self._arguments = (target, tokens, target_bytes, schedule, mask_token)
        self._tokens = tokens
        self.config = dspark_config(target.config, len(tokens), target_bytes, mask_token)
        self.taps = self.config.taps
        self.parameters = dspark_parameters(self.config)
        self.share = BYTES_A_WEIGHT * self.parameters / target_bytes
        ids = torch.from_numpy(tokens.astype(np.int64))
        self.module = DSpark(self.config)
        self.module.start_from(target, ids, torch.Generator().manual_seed(schedule.seed))
        self.objective = DSparkObjective(self.module, target, ids, schedule.seed)

    def fresh(self) -> DSparkKind:
        """Another one of the same beginning."""
        other = DSparkKind(*self._arguments)
        other.module.load_state_dict(self.module.state_dict())
        return other

    def continue_from(self, folder: Path) -> None:
        """Take the weights of another DSpark drafter; rows of its head go by their tokens."""
        checkpoint = open_checkpoint(folder)
        if family_of(checkpoint) != "dspark":
            raise UsageError(f"{folder} holds no DSpark drafter to begin with")
        theirs = read_dspark(checkpoint, max(self.taps) + 3, self.config.tap_width)
        _, known = dspark_weights(theirs, checkpoint, None)
        _take(self.module, checkpoint, self._tokens, known, ("lm_head.weight", "markov_head.markov_w2.weight"))

    def write(self, folder: Path, layout: Layout, target: str, context: int) -> None:
        """The drafter as others can load it."""
        weights: dict[str, torch.Tensor] = dict(self.module.named_parameters())
        write_dspark(folder, self.config, weights, self._tokens, layout, target, context)


def _take(
    module: nn.Module,
    checkpoint: Checkpoint,
    tokens: npt.NDArray[np.int32],
    known: npt.NDArray[np.int32] | None,
    by_token: Sequence[str],
) -> None:
    """Copy a checkpoint's weights. Rows of those `by_token` stand for the tokens `known` there (None: all) and for
    `tokens` here. Raises UsageError where shapes differ.
    """
    folder = checkpoint.files[0].parent
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            stored = checkpoint.tensors.get(name) or checkpoint.tensors.get(name.replace("midlayer.", "layers.0."))
            if stored is None:
                raise UsageError(f"{folder}: has no {name}")
            numbers = torch.from_numpy(stored.float32().copy())
            if name in by_token:
                rows = {int(t): row for row, t in enumerate(range(len(numbers)) if known is None else known)}
                places = [(mine, rows[int(t)]) for mine, t in enumerate(tokens) if int(t) in rows]
                parameter[[mine for mine, _ in places]] = numbers[[row for _, row in places]]
            elif numbers.shape != parameter.shape:
                raise UsageError(f"{folder}: {name} is {list(numbers.shape)}, this drafter's {list(parameter.shape)}")
            else:
                parameter.copy_(numbers)


LAYOUTS: dict[str, tuple[Layout, ...]] = {"eagle3": ("eagle3", "speculators"), "dspark": ("speculators", "deepspec")}


def make(
    kind: str,
    target: TargetParts,
    tokens: npt.NDArray[np.int32],
    target_bytes: int,
    schedule: Schedule,
    examples: Sequence[Example],
) -> Kind:
    """A drafter that is about to be trained on `examples`. Raises UsageError for a kind that cannot be trained."""
    if kind == "dspark":
        mask_token = mask_token_of(examples, target.config.vocabulary)
        return DSparkKind(target, tokens, target_bytes, schedule, mask_token)
    return Eagle3Kind(target, tokens, target_bytes, schedule)


def layout_for(kind: str, layout: str) -> Layout:
    """The layout that is meant; the first of the kind's own where none is named. Raises UsageError."""
    if kind not in LAYOUTS:
        raise UsageError(f"--kind is {' or '.join(LAYOUTS)}, not {kind!r}")
    if not layout:
        return LAYOUTS[kind][0]
    for known in LAYOUTS[kind]:
        if known == layout:
            return known
    raise UsageError(f"--layout of an {kind} drafter is {' or '.join(LAYOUTS[kind])}, not {layout!r}")
