"""Immediate: submitting and collecting steps for a backend that runs each at once."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from slipstream.kernels.backend import Float32Array, StepOutput
from slipstream.program import Rows
from slipstream.program.sampling import DrawColumns


class Immediate:
    """Mixin: a step runs when it is submitted, and its outcome waits to be collected."""

    def __init__(self) -> None:
        self._outcomes: deque[StepOutput] = deque()
        self._last = StepOutput()
        self.ids: npt.NDArray[np.int32] | None = None
        """Tokens that the head's rows stand for; None: their own numbers."""

    def set_vocabulary(self, tokens: npt.NDArray[np.int32]) -> None:
        """The head's rows stand for these tokens, ascending."""
        self.ids = tokens

    def step(
        self,
        rows: Rows,
        draws: DrawColumns | None,
        *,
        logits: bool = False,
        inputs: Float32Array | None = None,
    ) -> StepOutput:
        """Run a step; a backend's own."""
        raise NotImplementedError

    def submit(self, rows: Rows, draws: DrawColumns | None) -> None:
        """Run a step whose rows may hold tokens that the one before it drew."""
        rows.resolve(self._last.drawn.token if self._last.drawn is not None else ())
        self._last = self.step(rows, draws)
        self._outcomes.append(self._last)

    def wait(self) -> None:
        """Everything has run."""

    def collect(self) -> StepOutput:
        """The outcome of the oldest step that was not collected. Raises IndexError if there is none."""
        return self._outcomes.popleft()
