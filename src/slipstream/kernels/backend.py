"""Backend and Executable: what the engine asks of whatever runs a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slipstream.models.weights import WeightSource
from slipstream.program import Program, Rows
from slipstream.program.sampling import DrawColumns, Drawn

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step hands back. `logits` [logit rows, vocabulary] only if they were asked for."""

    drawn: Drawn | None = None
    logits: Float32Array | None = None
    taps: Mapping[str, Float32Array] = field(default_factory=dict)


class Executable(Protocol):
    """A compiled program with its weights and its cache."""

    @property
    def numerics(self) -> str:
        """Names everything that decides the bits; part of a cached block's namespace."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a one-row step reads."""

    def step(self, rows: Rows, draws: DrawColumns | None, *, logits: bool = False) -> StepOutput:
        """Compute the rows, writing their keys and values; draw a token for every logit row."""

    def step_seconds(self) -> npt.NDArray[np.float64] | None:
        """Of the last step: seconds by class (OP_CLASSES), the total, what was stolen; None: not accounted for."""

    def copy_blocks(self, pairs: npt.NDArray[np.int32]) -> None:
        """Copy cache blocks, pairs [n, 2] of (from, to)."""


class Backend(Protocol):
    """Compiles programs."""

    name: str

    def compile(self, program: Program, weights: WeightSource, blocks: int) -> Executable:
        """Load the weights and set up a cache of `blocks` blocks."""
