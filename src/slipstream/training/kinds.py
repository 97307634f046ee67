"""Kinds: what can be trained. Each knows its module, its objective, and how it is written down."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from slipstream.errors import UsageError
from slipstream.models import ModelConfig
from slipstream.speculation.checkpoint import Int32Array, family_of
from slipstream.speculation.dspark_model import dspark_weights, read_dspark
from slipstream.speculation.eagle3_model import eagle3_weights, read_eagle3
from slipstream.training.dataset import Example
from slipstream.training.dspark_objective import DSparkObjective
from slipstream.training.export import Layout, write_dspark, write_eagle3
from slipstream.training.modules.dspark import DSpark
from slipstream.training.modules.eagle3 import Eagle3
from slipstream.training.objectives import Eagle3Objective, Objective
from slipstream.training.sizes import (
    dspark_config,
    dspark_parameters,
    eagle3_config,
    eagle3_parameters,
    mask_token_of,
)
from slipstream.training.sizing import BYTES_A_WEIGHT, Shape
from slipstream.training.target import TargetParts
from slipstream.weights import Checkpoint
from slipstream.weights.open import open_checkpoint

UNROLL, DECAY = 5, 0.8
"""Steps of the training-time test, and what each counts beside the one before."""
LAYOUTS: dict[str, tuple[Layout, ...]] = {"eagle3": ("eagle3", "speculators"), "dspark": ("speculators", "deepspec")}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a drafter is made for: its target, of so many bytes, the tokens of its head, what it is trained on."""

    target: TargetParts
    target_bytes: int
    tokens: npt.NDArray[np.int32]
    examples: Sequence[Example]
    seed: int = 0
    taps: tuple[int, ...] = ()
    """The layers whose inputs it reads, if that is not to be chosen."""
    layers: int = 1
    ffn: int | None = None
    """Its layers, and the width of their MLPs; None: the target's."""

    @property
    def width(self) -> int:
        """Of the MLPs."""
        return self.target.config.ffn if self.ffn is None else self.ffn

    @property
    def shape(self) -> Shape:
        """What was chosen of it."""
        return Shape(self.layers, self.width, len(self.tokens))

    @property
    def ids(self) -> torch.Tensor:
        """The tokens, as torch indexes by them."""
        return torch.from_numpy(self.tokens.astype(np.int64))


class Kind(ABC):
    """A drafter in training. `taps` are the target's layers whose inputs it reads."""

    family: str
    by_token: tuple[str, ...]
    """Weights whose rows stand for the tokens of the head."""

    def __init__(self, wanted: Wanted, taps: tuple[int, ...], parameters: int, module: nn.Module, objective: Objective):
        self.wanted, self.taps, self.parameters = wanted, taps, parameters
        self.module, self.objective = module, objective

    @property
    def share(self) -> float:
        """Of the target's bytes, when it drafts."""
        return BYTES_A_WEIGHT * self.parameters / self.wanted.target_bytes

    def fresh(self) -> Kind:
        """Another one of the same beginning."""
        other = KINDS[self.family](self.wanted)
        other.module.load_state_dict(self.module.state_dict())
        return other

    def continue_from(self, folder: Path) -> None:
        """Begin with the weights of a drafter in a folder. Raises UsageError where it has another shape."""
        checkpoint = _opened(folder, self.family)
        known = self._tokens_of(checkpoint)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                stored = checkpoint.tensors.get(name) or checkpoint.tensors.get(name.replace("midlayer.", "layers.0."))
                if stored is None:
                    raise UsageError(f"{folder}: has no {name}")
                numbers = torch.from_numpy(stored.float32().copy())
                if name in self.by_token:
                    rows = {int(t): row for row, t in enumerate(range(len(numbers)) if known is None else known)}
                    places = [(mine, rows[int(t)]) for mine, t in enumerate(self.wanted.tokens) if int(t) in rows]
                    parameter[[mine for mine, _ in places]] = numbers[[row for _, row in places]]
                elif numbers.shape != parameter.shape:
                    raise UsageError(
                        f"{folder}: {name} is {list(numbers.shape)}, this drafter's {list(parameter.shape)}"
                    )
                else:
                    parameter.copy_(numbers)

    @abstractmethod
    def _tokens_of(self, checkpoint: Checkpoint) -> Int32Array | None:
        """The tokens that a checkpoint's head knows; None: all."""

    @abstractmethod
    def write(self, folder: Path, layout: Layout, target: str, context: int) -> None:
        """The drafter as others can load it. Raises UsageError for a layout that cannot hold it."""


class Eagle3Kind(Kind):
    """An EAGLE-3 drafter of one layer."""

    family, by_token = "eagle3", ("lm_head.weight",)

    def __init__(self, wanted: Wanted):
        self.config = eagle3_config(wanted.target.config, len(wanted.tokens), wanted.width, wanted.taps)
        module = Eagle3(self.config)
        module.start_from(wanted.target, wanted.ids, torch.Generator().manual_seed(wanted.seed))
        objective = Eagle3Objective(module, wanted.target, wanted.ids, UNROLL, DECAY, wanted.seed)
        super().__init__(wanted, self.config.taps, eagle3_parameters(self.config), module, objective)

    def _tokens_of(self, checkpoint: Checkpoint) -> Int32Array | None:
        config = self.wanted.target.config
        return eagle3_weights(read_eagle3(checkpoint, config.layers, config.hidden), checkpoint, None)[1]

    def write(self, folder: Path, layout: Layout, target: str, context: int) -> None:
        """In the paper's layout or that of speculators."""
        weights, layers = dict(self.module.named_parameters()), self.wanted.target.config.layers
        write_eagle3(folder, self.config, weights, self.wanted.tokens, layout, target, layers, context)


class DSparkKind(Kind):
    """A DSpark drafter."""

    family, by_token = "dspark", ("lm_head.weight", "markov_head.markov_w2.weight")

    def __init__(self, wanted: Wanted):
        mask_token = mask_token_of(wanted.examples, wanted.target.config.vocabulary)
        self.config = dspark_config(
            wanted.target.config, len(wanted.tokens), wanted.width, wanted.layers, mask_token, wanted.taps
        )
        module = self._drafter = DSpark(self.config)
        module.start_from(wanted.target, wanted.ids, torch.Generator().manual_seed(wanted.seed))
        objective = DSparkObjective(module, wanted.target, wanted.ids, wanted.seed)
        super().__init__(wanted, self.config.taps, dspark_parameters(self.config), module, objective)

    def continue_from(self, folder: Path) -> None:
        """The token that stands for what is not known stays the one that the weights have learned."""
        super().continue_from(folder)
        target = self.wanted.target.config
        self._take(read_dspark(open_checkpoint(folder), target.layers, target.hidden).mask_token)

    def fresh(self) -> Kind:
        """Another one of the same beginning."""
        other = super().fresh()
        assert isinstance(other, DSparkKind)
        other._take(self.config.mask_token)
        return other

    def _take(self, mask_token: int) -> None:
        self.config = self._drafter.config = replace(self.config, mask_token=mask_token)

    def _tokens_of(self, checkpoint: Checkpoint) -> Int32Array | None:
        config = self.wanted.target.config
        return dspark_weights(read_dspark(checkpoint, config.layers, config.hidden), checkpoint, None)[1]

    def write(self, folder: Path, layout: Layout, target: str, context: int) -> None:
        """In the layout of speculators or DeepSpec."""
        weights = dict(self.module.named_parameters())
        write_dspark(folder, self.config, weights, self.wanted.tokens, layout, target, context)


KINDS: dict[str, type[Eagle3Kind] | type[DSparkKind]] = {"eagle3": Eagle3Kind, "dspark": DSparkKind}


def shape_in(folder: Path, kind: str, target: ModelConfig) -> tuple[int, int]:
    """(layers, width of their MLPs) of a drafter in a folder. Raises UsageError where it is of another kind."""
    checkpoint = _opened(folder, kind)
    read = read_eagle3 if kind == "eagle3" else read_dspark
    config = read(checkpoint, target.layers, target.hidden)
    return config.layers, config.ffn


def _opened(folder: Path, kind: str) -> Checkpoint:
    checkpoint = open_checkpoint(folder)
    if family_of(checkpoint) != kind:
        raise UsageError(f"{folder} holds no {kind} drafter to begin with")
    return checkpoint


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
