"""Backend and Executable: what the engine asks of whatever runs a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from slipstream.models.weights import WeightSource
from slipstream.program import Program, Rows
from slipstream.program.sampling import DrawColumns, Drawn

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]


class StepSeconds(NamedTuple):
    """A step's seconds: `classes` of each class of work (OP_CLASSES), all of them, how many of those a thread could
    not run, and when it began by time.perf_counter.
    """

    classes: Float64Array
    total: float
    stolen: float
    begun: float

    @classmethod
    def of(cls, values: Float64Array) -> StepSeconds:
        """From the classes' seconds followed by the other three."""
        total, stolen, begun = values[-3:].tolist()
        return cls(values[:-3], total, stolen, begun)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step hands back. `logits` [logit rows, vocabulary] only if they were asked for.

    `taps` are [rows, width] each; `side_by_side` is all of them in one piece, from a backend that has them like that.
    `seconds` is what `StepSeconds.of` takes apart; None from a backend that keeps no accounts.
    """

    drawn: Drawn | None = None
    logits: Float32Array | None = None
    taps: Mapping[str, Float32Array] = field(default_factory=dict)
    seconds: Float64Array | None = None
    side_by_side: Float32Array | None = None

    def joined(self, names: Sequence[str]) -> Float32Array:
        """Some taps side by side [rows, width of all of them]."""
        if self.side_by_side is not None and [*self.taps] == [*names]:
            return self.side_by_side
        return np.concatenate([self.taps[name] for name in names], axis=1)


class Worth(NamedTuple):
    """How long a chain of drawn tokens is worth following: while all of it survives with `price` at least.

    A token survives with the chance of the class that its probability is in; classes begin at `bounds` [classes - 1],
    after the first. What comes before the chain survives with `alive`.
    """

    bounds: Float64Array
    chances: Float64Array
    alive: float
    price: float


def checked_inputs(inputs: Float32Array | None, rows: int, width: int) -> Float32Array:
    """What a step was handed for its Input op. Raises ValueError if it is not [rows, width]."""
    if inputs is None or inputs.shape != (rows, width):
        raise ValueError(f"the program takes numbers [{rows}, {width}] with its rows")
    return inputs


class Executable(Protocol):
    """A compiled program with its weights and its cache. Steps that are submitted run in order, one after the other."""

    @property
    def numerics(self) -> str:
        """Names everything that decides the bits; part of a cached block's namespace."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a one-row step reads."""

    def step(
        self,
        rows: Rows,
        draws: DrawColumns | None,
        *,
        logits: bool = False,
        inputs: Float32Array | None = None,
    ) -> StepOutput:
        """Compute the rows, writing their keys and values; draw a token for every logit row. Nothing else may run.

        `inputs` [rows, width] are what the program's Input op takes. Raises ValueError if they are not that.
        """

    def redraw(self, rows: Int32Array, draws: DrawColumns) -> Drawn:
        """Draw some logit rows of the last step again, by `draws` instead. No step may be running since."""

    def follow(self, rows: Rows, draws: DrawColumns, inputs: Float32Array, slots: Int32Array, worth: Worth) -> Drawn:
        """Run a row and draw after it; then, a position further, the token that was drawn, with what was tapped as its
        `inputs`; and so on, in one slot after the other. Returns the tokens in their order, as draws of one step.

        For programs whose one tap is as wide as their input. Nothing else may run. Raises ValueError for more rows.
        """

    def submit(self, rows: Rows, draws: DrawColumns | None) -> None:
        """Queue a step. Rows may hold tokens that the one before it draws (see `sampled`); they are filled in."""

    def wait(self) -> None:
        """Until all submitted steps have run, and the blocks are copied that waited for them."""

    def collect(self) -> StepOutput:
        """The outcome of the oldest submitted step that was not collected, as soon as it is there."""

    def copy_blocks(self, pairs: npt.NDArray[np.int32]) -> None:
        """Copy blocks, pairs [n, 2] of (from, to) in order, between the steps submitted so far and those to come."""

    def copy_slots(self, pairs: npt.NDArray[np.int32]) -> None:
        """Copy single slots of all layers, pairs [n, 2] of (from, to) in order. No step may be running."""

    def set_vocabulary(self, tokens: npt.NDArray[np.int32]) -> None:
        """The head's rows stand for these tokens, ascending: draws are given by them, and take their noise.

        Adjusted and masked tokens are given by row all the same.
        """

    def sibling(self, program: Program) -> Executable:
        """Another program over the same weights, cache and threads; the two never run at the same time."""


class Backend(Protocol):
    """Compiles programs."""

    name: str

    def compile(self, program: Program, weights: WeightSource, blocks: int, spare: int = 0) -> Executable:
        """Load the weights and set up a cache of `blocks` blocks, and `spare` ones after them for copies only."""
