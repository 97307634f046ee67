"""Embedding: texts as vectors, from the model's last hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from slipstream.engine.aside import Aside, Job
from slipstream.engine.drafters import with_taps
from slipstream.engine.model import Model
from slipstream.errors import UsageError
from slipstream.kernels import Executable
from slipstream.models import record_program
from slipstream.models.weights import ModelWeights
from slipstream.program import Rows, ShardPlan
from slipstream.weights.open import open_checkpoint
from slipstream.weights.references import resolve

Pooling = Literal["mean", "last"]
POOLINGS: tuple[Pooling, ...] = ("mean", "last")
Float32Array = npt.NDArray[np.float32]


@dataclass
class _Job(Job):
    """`total` is the sum over the text at hand so far, or its last hidden state."""

    pooling: Pooling
    normalize: bool
    total: Float32Array | None = None


class Embedder(Aside[_Job]):
    """A job's results are vectors, little-endian float32."""

    most_rows, scores = 256, False
    _norm: tuple[Float32Array, float] | None = None
    _tapped: tuple[Model, Executable] | None = None

    def add(self, number: int, prompts: list[list[int]], pooling: str, *, normalize: bool, tenant: str = "") -> None:
        """Take a job. Raises UsageError for what can never be computed."""
        for known in POOLINGS:
            if known == pooling:
                self.take(_Job(number, prompts, tenant, known, normalize))
                return
        raise UsageError(f"pooling is {' or '.join(POOLINGS)}, not {pooling!r}")

    def _compute(self, job: _Job, rows: Rows) -> None:
        hidden = self._run(rows)
        if job.pooling == "last":
            job.total = hidden[-1]
        else:  # added up row by row, so that it is the same whatever the chunks
            before = [] if job.total is None else [job.total[None]]
            job.total = np.concatenate([*before, hidden]).sum(0)

    def _result(self, job: _Job) -> bytes:
        assert job.total is not None
        vector = job.total / (job.computed if job.pooling == "mean" else 1)
        job.total = None
        if job.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return vector.astype("<f4").tobytes()

    def _run(self, rows: Rows) -> Float32Array:
        """Hidden states after the last norm."""
        model = self._engine.model
        layers = model.config.layers
        if self._tapped is None or self._tapped[0] is not model:  # it changes when a drafter comes
            self._tapped = model, with_taps(model, (layers,)).executable
        taps = self._tapped[1].step(rows, None).taps[f"layer.{layers}"]
        weight, eps = self._last_norm()
        scale = 1.0 / np.sqrt(np.square(taps).mean(-1, keepdims=True) + eps)
        return np.asarray(taps * scale * weight, np.float32)

    def _last_norm(self) -> tuple[Float32Array, float]:
        if self._norm is None:
            model = self._engine.model
            weights = ModelWeights(model.config, open_checkpoint(resolve(model.reference)))
            program = record_program(model.config, max_len=64, kv_format=model.cache.groups[0].format)
            norm = weights.float32(program.weights["norm.weight"], ShardPlan())
            self._norm = norm.copy(), model.config.norm_eps
        return self._norm
