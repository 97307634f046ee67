"""Aside: texts that are computed between the steps that answer people, and leave nothing behind.

A text lies in blocks of the cache while it is computed, chunk by chunk, as much at a time as those who read an answer
can bear. Tenants take turns, text by text. A sibling of the engine's executable does it, with the same weights, threads
and cache, so that what the engine's own steps leave stays as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from slipstream.engine.engine import Engine
from slipstream.errors import UsageError
from slipstream.program import BLOCK_SLOTS, Rows, StepShape
from slipstream.program.rows import NO_PARENT
from slipstream.roofline.cost import CostModel
from slipstream.scheduling.scheduler import BEARABLE, LEAST_CHUNK, MOST_STRETCH


@dataclass
class Job:
    """Texts that were asked for together, and how far they are."""

    number: int
    prompts: list[list[int]]
    tenant: str
    results: list[Any] = field(default_factory=list, init=False)
    blocks: list[int] = field(default_factory=list, init=False)
    computed: int = field(default=0, init=False)


def bearable_rows(cost: CostModel, answers: StepShape, target: float | None, most: int, text: StepShape) -> int:
    """Rows of a text, `most` at most, whose step and then that of the `answers` keep within what the scheduler allows a
    step with prompts in it. `text` is a row of the step, with what it finds in the cache.
    """
    bare = cost.seconds(answers)
    extra = (target or max(BEARABLE, MOST_STRETCH * bare)) - bare

    def seconds(rows: int) -> float:
        context = rows * text.row_context + rows * (rows - 1) // 2
        return cost.seconds(StepShape(rows, rows * text.logit_rows, text.kv_bytes, context))

    return max(min(LEAST_CHUNK, most), bisect_right(range(1, most + 1), extra, key=seconds))


AnyJob = TypeVar("AnyJob", bound=Job)


class Aside(ABC, Generic[AnyJob]):
    """Works through what was asked, a chunk at each `step`."""

    most_rows: int
    """Rows that are computed at a time, at most."""
    scores: bool
    """Whether logits are wanted of every token that another one follows."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._jobs: list[AnyJob] = []
        self._turns: dict[str, int] = {}  # of each tenant who waits, when it last had one
        self._turn = 0

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
            self._forget(job)

    def step(self) -> tuple[int, list[Any]] | None:
        """Compute a chunk, if the cache has room; a job's number and results when it is done."""
        job, engine = self._next(), self._engine
        prompt = job.prompts[len(job.results)]
        if not job.blocks:
            needs = -(-len(prompt) // BLOCK_SLOTS)
            if engine.pool.available < needs:
                return None
            job.blocks, job.computed = engine.borrow(needs), 0
        start = job.computed
        end = job.computed = start + self._rows(start, len(prompt) - start)
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
            self._turn += 1
            self._turns[job.tenant] = self._turn
            if len(job.results) == len(job.prompts):
                self._forget(job)
                return job.number, job.results
        return None

    def _next(self) -> AnyJob:
        """The job whose text is begun, or the first of the tenant whose last turn is longest ago."""
        begun = (job for job in self._jobs if job.blocks)
        return next(begun, None) or min(self._jobs, key=lambda job: self._turns.get(job.tenant, 0))

    def _forget(self, job: AnyJob) -> None:
        self._jobs.remove(job)
        if all(other.tenant != job.tenant for other in self._jobs):
            self._turns.pop(job.tenant, None)

    def _rows(self, start: int, left: int) -> int:
        """How many of the rows that are left are computed now."""
        engine, kv_bytes = self._engine, self._engine.model.cache.bytes_per_token
        most = min(left, self.most_rows, engine.model.max_rows)
        reading = [sequence.length for sequence in engine.sequences if sequence.blocks]
        cost = engine.cost if reading else None
        if cost is None:
            return most
        context = sum(reading)
        answers = StepShape(len(reading), len(reading), context * kv_bytes, context)
        text = StepShape(1, int(self.scores), start * kv_bytes, start + 1)
        return bearable_rows(cost, answers, engine.limits.tpot_target, most, text)

    @abstractmethod
    def _compute(self, job: AnyJob, rows: Rows) -> None:
        """Run the next rows of the text at hand, and keep what is wanted of them."""

    @abstractmethod
    def _result(self, job: AnyJob) -> Any:
        """What the text at hand came to; the next one begins."""
