"""Scoring: how likely the model finds each token of a text after those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from slipstream.engine.aside import Aside, Job
from slipstream.engine.model import Model
from slipstream.engine.output import TokenLogprob
from slipstream.kernels import Executable
from slipstream.models import record_program
from slipstream.program import Rows


@dataclass
class _Job(Job):
    """`top` are as many of the likeliest tokens as are told at each place."""

    top: int
    scores: list[TokenLogprob] = field(default_factory=list, init=False)


class Scorer(Aside[_Job]):
    """A job's results are the log-probabilities of each text's tokens, its first one left out."""

    most_rows, scores = 32, True
    _sibling: tuple[Model, Executable] | None = None

    def add(self, number: int, prompts: list[list[int]], top: int, tenant: str = "") -> None:
        """Take a job. Raises UsageError for what can never be computed."""
        self.take(_Job(number, prompts, tenant, top))

    def _compute(self, job: _Job, rows: Rows) -> None:
        logits = self._executable().step(rows, None, logits=True).logits
        assert logits is not None
        begun = len(job.scores) + 1
        following = job.prompts[len(job.results)][begun : begun + len(logits)]
        job.scores += logprobs_of(logits, following, job.top)

    def _result(self, job: _Job) -> list[TokenLogprob]:
        scores, job.scores = job.scores, []
        return scores

    def _executable(self) -> Executable:
        model = self._engine.model
        if self._sibling is None or self._sibling[0] is not model:  # it changes when a drafter comes
            program = record_program(model.config, max_len=model.max_len, kv_format=model.cache.groups[0].format)
            self._sibling = model, model.executable.sibling(program)
        return self._sibling[1]


def logprobs_of(logits: npt.NDArray[np.float32], tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Of tokens, one after each row of logits, and of the `top` likeliest ones there."""
    places = np.arange(len(logits))[:, None]
    logits = logits - logits.max(-1, keepdims=True, initial=-np.inf)
    whole = np.log(np.exp(logits).sum(-1, dtype=np.float64, keepdims=True))
    best = np.argpartition(logits, -top)[:, -top:] if top else np.empty((len(logits), 0), np.intp)
    best = best[places, np.argsort(-logits[places, best])]
    own, others = logits[places, np.array(tokens, np.intp)[:, None]] - whole, logits[places, best] - whole
    return [
        TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, (logprob,), ids, values in zip(tokens, own.tolist(), best.tolist(), others.tolist(), strict=True)
    ]
