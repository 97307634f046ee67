"""Immediate: submitting and collecting steps for a backend that runs each at once."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from slipstream.kernels.backend import Float32Array, Int32Array, StepOutput, Worth
from slipstream.program import Rows
from slipstream.program.sampling import DrawColumns, Drawn


class Immediate:
    """Mixin: a step runs when it is submitted, and its outcome waits to be collected."""

    def __init__(self) -> None:
        self._outcomes: deque[StepOutput] = deque()
        self._last = StepOutput()
        self.ids: npt.NDArray[np.int32] | None = None
        """Tokens that the head's rows stand for; None: their own numbers."""
        self._scores: Float32Array | None = None
        """The last step's logits [logit rows, vocabulary]."""

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

    def redraw(self, rows: Int32Array, draws: DrawColumns) -> Drawn:
        """Logit rows of the last step, drawn again otherwise."""
        if self._scores is None or not len(self._scores) > rows.max(initial=-1) >= rows.min(initial=0) >= 0:
            raise ValueError("the last step had no such logit rows")
        from slipstream.kernels.reference.sampling import draw  # whose package's backend is one of these

        return draw(self._scores[rows], draws, self.ids)

    def follow(self, rows: Rows, draws: DrawColumns, inputs: Float32Array, slots: Int32Array, worth: Worth) -> Drawn:
        """A chain of draws, step by step."""
        if len(rows) != 1:
            raise ValueError("a chain begins with one row")
        rows = replace(rows, columns=rows.columns.copy())
        draws = replace(draws, ints=draws.ints.copy())
        drawn: list[Drawn] = []
        alive = worth.alive
        for slot in slots:
            rows.slot[0] = slot
            output = self.step(rows, draws, inputs=inputs)
            assert output.drawn is not None
            drawn.append(output.drawn)
            probability = np.exp(output.drawn.logprobs[0, 0])
            alive *= worth.chances[np.searchsorted(worth.bounds, probability, side="right")]
            if alive < worth.price:
                break
            (inputs,) = output.taps.values()
            rows.token[0] = output.drawn.token[0]
            rows.position[0] += 1
            draws.position[0] += 1
        return Drawn(np.concatenate([d.tokens for d in drawn]), np.concatenate([d.logprobs for d in drawn]))

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
