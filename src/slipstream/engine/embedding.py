"""Embedding: texts as vectors, from the model's last hidden states, computed between the steps that answer people.

A sibling of the engine's executable hands the hidden states out; it has the same weights, threads and cache. A text
lies in blocks of the cache while it is computed, chunk by chunk, and leaves nothing there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from slipstream.engine.drafters import with_taps
from slipstream.engine.engine import Engine
from slipstream.engine.model import Model
from slipstream.errors import UsageError
from slipstream.kernels import Executable
from slipstream.models import record_program
from slipstream.models.weights import ModelWeights
from slipstream.program import BLOCK_SLOTS, Rows, ShardPlan
from slipstream.program.rows import NO_PARENT
from slipstream.weights.open import open_checkpoint
from slipstream.weights.references import resolve

Pooling = Literal["mean", "last"]
POOLINGS: tuple[Pooling, ...] = ("mean", "last")
ROWS = 256
"""Rows that are computed at a time: whoever is being answered waits for no more."""
Float32Array = npt.NDArray[np.float32]


@dataclass
class _Job:
    """Texts that were asked for together."""

    number: int
    prompts: list[list[int]]
    pooling: Pooling
    normalize: bool
    vectors: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    total: Float32Array | None = None


class Embedder:
    """Works through what was asked, a chunk at each `step`."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._jobs: deque[_Job] = deque()
        self._norm: tuple[Float32Array, float] | None = None
        self._tapped: tuple[Model, Executable] | None = None

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._jobs)

    def add(self, number: int, prompts: list[list[int]], pooling: str, *, normalize: bool) -> None:
        """Take a job. Raises UsageError for what can never be computed."""
        model = self._engine.model
        for prompt in prompts:
            if not 0 < len(prompt) <= model.max_len:
                raise UsageError(f"a text has {len(prompt)} tokens, the context holds 1 to {model.max_len}")
            if -(-len(prompt) // BLOCK_SLOTS) > self._engine.pool.size:
                raise UsageError("a text is longer than the whole cache")
            if any(not 0 <= token < model.config.vocabulary for token in prompt):
                raise UsageError("a text has a token outside the vocabulary")
        for known in POOLINGS:
            if known == pooling:
                self._jobs.append(_Job(number, prompts, known, normalize))
                return
        raise UsageError(f"pooling is {' or '.join(POOLINGS)}, not {pooling!r}")

    def drop(self, number: int) -> None:
        """Forget a job."""
        for job in [job for job in self._jobs if job.number == number]:
            self._engine.give_back(job.blocks)
            self._jobs.remove(job)

    def step(self) -> tuple[int, list[bytes]] | None:
        """Compute a chunk, if the cache has room; a job's number and vectors (float32) when it is done."""
        job, engine = self._jobs[0], self._engine
        prompt = job.prompts[len(job.vectors)]
        if not job.blocks:
            needs = -(-len(prompt) // BLOCK_SLOTS)
            if engine.pool.available < needs:
                return None
            job.blocks = engine.borrow(needs)
            job.computed, job.total = 0, None
        end = min(len(prompt), job.computed + min(ROWS, engine.model.max_rows))
        hidden = self._run(prompt, job.computed, end, job.blocks)
        chosen = hidden.sum(0) if job.pooling == "mean" else hidden[-1]
        job.total = chosen if job.total is None or job.pooling == "last" else job.total + chosen
        job.computed = end
        if end == len(prompt):
            engine.give_back(job.blocks)
            job.blocks = []
            vector = job.total / (len(prompt) if job.pooling == "mean" else 1)
            if job.normalize:
                vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
            job.vectors.append(vector.astype("<f4").tobytes())
            if len(job.vectors) == len(job.prompts):
                self._jobs.popleft()
                return job.number, job.vectors
        return None

    def _run(self, prompt: list[int], start: int, end: int, blocks: list[int]) -> Float32Array:
        """Hidden states after the last norm of tokens `start` to `end`."""
        engine = self._engine
        layers, count = engine.model.config.layers, end - start
        engine.settle()
        if self._tapped is None or self._tapped[0] is not engine.model:  # it changes when a drafter comes
            self._tapped = engine.model, with_taps(engine.model, (layers,)).executable
        executable = self._tapped[1]
        slots = [blocks[at // BLOCK_SLOTS] * BLOCK_SLOTS + at % BLOCK_SLOTS for at in range(start, end)]
        columns = [[0] * count, prompt[start:end], range(start, end), slots, [NO_PARENT, *range(count - 1)]]
        table = blocks[: -(-end // BLOCK_SLOTS)]
        taps = executable.step(Rows.of_columns(columns, [], [table]), None).taps[f"layer.{layers}"]
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
