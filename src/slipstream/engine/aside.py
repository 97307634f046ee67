"""Aside: texts that are computed between the steps that answer people, and leave nothing behind.

A text lies in blocks of the cache while it is computed, chunk by chunk. A sibling of the engine's executable does it,
with the same weights, threads and cache, so that what the engine's own steps leave stays as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from slipstream.engine.engine import Engine
from slipstream.errors import UsageError
from slipstream.program import BLOCK_SLOTS, Rows
from slipstream.program.rows import NO_PARENT


@dataclass
class Job:
    """Texts that were asked for together, and how far they are."""

    number: int
    prompts: list[list[int]]
    results: list[Any] = field(default_factory=list, init=False)
    blocks: list[int] = field(default_factory=list, init=False)
    computed: int = field(default=0, init=False)


AnyJob = TypeVar("AnyJob", bound=Job)


class Aside(ABC, Generic[AnyJob]):
    """Works through what was asked, a chunk at each `step`."""

    most_rows: int
    """Rows that are computed at a time: whoever is being answered waits for no more."""
    scores: bool
    """Whether logits are wanted of every token that another one follows."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._jobs: deque[AnyJob] = deque()

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._jobs)

    def take(self, job: AnyJob) -> None:
        """Take a job. Raises UsageError for what can never be computed."""
        model = self._engine.model
        for prompt in job.prompts:
            if not 0 < len(prompt) <= model.max_len:
                raise UsageError(f"a text has {len(prompt)} tokens, the context holds 1 to {model.max_len}")
            if -(-len(prompt) // BLOCK_SLOTS) > self._engine.pool.size:
                raise UsageError("a text is longer than the whole cache")
            if any(not 0 <= token < model.config.vocabulary for token in prompt):
                raise UsageError("a text has a token outside the vocabulary")
        self._jobs.append(job)

    def drop(self, number: int) -> None:
        """Forget a job."""
        for job in [job for job in self._jobs if job.number == number]:
            self._engine.give_back(job.blocks)
            self._jobs.remove(job)

    def step(self) -> tuple[int, list[Any]] | None:
        """Compute a chunk, if the cache has room; a job's number and results when it is done."""
        job, engine = self._jobs[0], self._engine
        prompt = job.prompts[len(job.results)]
        if not job.blocks:
            needs = -(-len(prompt) // BLOCK_SLOTS)
            if engine.pool.available < needs:
                return None
            job.blocks, job.computed = engine.borrow(needs), 0
        start = job.computed
        end = job.computed = min(len(prompt), start + min(self.most_rows, engine.model.max_rows))
        slots = [job.blocks[at // BLOCK_SLOTS] * BLOCK_SLOTS + at % BLOCK_SLOTS for at in range(start, end)]
        count = end - start
        columns = [[0] * count, prompt[start:end], range(start, end), slots, [NO_PARENT, *range(count - 1)]]
        scored = range(min(end, len(prompt) - 1) - start) if self.scores else ()
        engine.settle()
        self._compute(job, Rows.of_columns(columns, scored, [job.blocks[: -(-end // BLOCK_SLOTS)]]))
        if end == len(prompt):
            engine.give_back(job.blocks)
            job.blocks = []
            job.results.append(self._result(job))
            if len(job.results) == len(job.prompts):
                self._jobs.popleft()
                return job.number, job.results
        return None

    @abstractmethod
    def _compute(self, job: AnyJob, rows: Rows) -> None:
        """Run the next rows of the text at hand, and keep what is wanted of them."""

    @abstractmethod
    def _result(self, job: AnyJob) -> Any:
        """What the text at hand came to; the next one begins."""
