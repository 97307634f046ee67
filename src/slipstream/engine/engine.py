"""The loop that joins the layers: plan a step, run it, hand out what was drawn."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from slipstream.engine.accounts import StepAccounts
from slipstream.engine.model import Model
from slipstream.engine.output import Chunk, FinishReason, OutputState, TokenLogprob
from slipstream.errors import SlipstreamError, UsageError
from slipstream.kvcache import BlockPool, PrefixCache
from slipstream.program import BLOCK_SLOTS, Namespace, Rows, StepShape
from slipstream.program.sampling import DrawColumns, Drawn, SamplingParams
from slipstream.roofline.accounting import Accounting
from slipstream.roofline.cost import CostModel
from slipstream.scheduling import Limits, Plan, Sequence, SpanPlan, State, schedule
from slipstream.scheduling.scheduler import blocks_needed

Planner = Callable[[State], Plan]


@dataclass
class Timings:
    """Seconds and tokens of one request; None until it happened."""

    arrived: float
    prompt_tokens: int
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    generated: int = 0
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def queue_seconds(self) -> float:
        """From arrival to the first step."""
        return (self.started or self.arrived) - self.arrived

    @property
    def prefill_seconds(self) -> float:
        """From arrival to the first token."""
        return (self.first_token or self.arrived) - self.arrived

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return (self.finished or self.arrived) - (self.first_token or self.arrived)

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second after the first one; 0 if there were none."""
        later = self.generated - 1
        return later / self.decode_seconds if later > 0 and self.decode_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Terms:
    """Whose request it is and how it is to be treated: a lower priority goes first, `timeout` is in seconds.

    Only requests of one tenant and one `cache_salt` share cached prefixes.
    """

    tenant: str = ""
    priority: int = 0
    timeout: float = math.inf
    cache_salt: str = ""


@dataclass
class _Request:
    timings: Timings
    outputs: dict[int, OutputState]
    open: set[int]
    namespace: Namespace


class Engine:
    """Runs requests on one model, many at once. Not safe for use by two threads at once."""

    def __init__(
        self,
        model: Model,
        cost: CostModel | None = None,
        planner: Planner = schedule,
        limits: Limits | None = None,
        prefix_cache: bool = True,
    ):
        """`cost` prices steps and is kept true by the steps that are run; `planner` chooses their rows."""
        self.model, self.planner = model, planner
        self.limits = limits or Limits(model.max_rows)
        self._accounts = StepAccounts(model, cost)
        self.last_step: tuple[Rows, DrawColumns | None] | None = None
        """What the last step was given; running it again changes nothing."""
        self.pool = BlockPool(model.blocks)
        price = _block_price(cost, model.cache.bytes_per_token) if cost else None
        self.prefix = PrefixCache(self.pool, price) if prefix_cache else None
        self.timings: dict[int, Timings] = {}
        self.preemptions = 0
        """Times that a sequence lost its blocks, since the start."""
        self.served: dict[str, float] = {}
        """Rows that each tenant with an open request has had."""
        self._sequences: list[Sequence] = []
        self._requests: dict[int, _Request] = {}
        self._next_request = 0

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._sequences)

    @property
    def sequences(self) -> SequenceOf[Sequence]:
        """Unfinished sequences in order of arrival; not to be changed."""
        return self._sequences

    def add(self, prompt: list[int], params: SamplingParams, terms: Terms | None = None) -> int:
        """Queue a request and return its number. Raises UsageError if it can never run."""
        terms = terms or Terms()
        params.check_vocabulary(self.model.config.vocabulary)
        if not prompt:
            raise UsageError("the prompt has no tokens")
        if any(not 0 <= token < self.model.config.vocabulary for token in prompt):
            raise UsageError("the prompt has a token outside the vocabulary")
        if len(prompt) >= self.model.max_len:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, the context holds {self.model.max_len}; "
                "shorten it or raise --max-model-len"
            )
        if -(-(len(prompt) + 1) // BLOCK_SLOTS) > self.pool.size:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, the whole cache holds {self.pool.size * BLOCK_SLOTS}; "
                "shorten it or give the cache more memory"
            )
        if not self.busy:
            self._accounts.woken()
        now = time.perf_counter()
        number, self._next_request = self._next_request, self._next_request + 1
        seed = secrets.randbits(64) if params.seed is None else params.seed
        namespace = replace(self.model.namespace, salt=f"{terms.tenant}/{terms.cache_salt}")
        # A tenant that was away does not come back with a claim on all it did not use.
        least = min((self.served[s.tenant] for s in self._sequences), default=0.0)
        self.served[terms.tenant] = max(self.served.get(terms.tenant, 0.0), least)
        first: Sequence | None = None
        request = _Request(Timings(now, len(prompt)), {}, set(range(params.n)), namespace)
        for choice in range(params.n):
            sequence = Sequence(
                number, choice, list(prompt), len(prompt), params, seed, self.model.eos, waits_for=first,
                tenant=terms.tenant, priority=terms.priority, arrived=now, deadline=now + terms.timeout,
            )  # fmt: skip
            first = first or sequence
            request.outputs[choice] = OutputState(sequence, self.model.tokenizer, self.model.max_len)
            self._sequences.append(sequence)
        self._requests[number] = request
        self.timings[number] = request.timings
        return number

    def cancel(self, number: int) -> None:
        """Drop a request; its blocks are free at once."""
        for sequence in [s for s in self._sequences if s.request == number]:
            self._end(sequence)

    def step(self) -> list[Chunk]:
        """Run one step and return its news, in the order of the sequences."""
        accounts = self._accounts
        accounts.begin()
        plan = self.planner(self._state())
        chunks = [self._drop(sequence, "length") for sequence in plan.too_large]
        chunks += [self._drop(sequence, "abort") for sequence in plan.expired]
        for sequence in plan.preempted:
            self._preempt(sequence)
        spans = [self._start(span) for span in plan.spans]
        if not spans:
            if self._sequences and not chunks and not plan.preempted:
                raise SlipstreamError("no sequence can run: the cache is too small")
            return chunks
        drawing = [sequence for sequence, rows in spans if rows == sequence.missing]
        draws = DrawColumns.of([sequence.draw() for sequence in drawing])
        rows = self._rows(spans)
        accounts.planned(spans)
        self.last_step = rows, draws if drawing else None
        output = self.model.executable.step(*self.last_step)
        accounts.ran()
        for sequence, count in spans:
            sequence.computed += count
            self.served[sequence.tenant] += count
            if self.prefix is not None:
                self._remember(sequence)
        if output.drawn is not None:
            for index, sequence in enumerate(drawing):
                chunks.append(self._accept(sequence, output.drawn, index))
        accounts.end(self.busy)
        return chunks

    def _state(self) -> State:
        peek = self._peek if self.prefix is not None else None
        return State(
            time.perf_counter(), self._sequences, self.pool, self.limits, self.served, self._accounts.snapshot,
            self.model.cache.bytes_per_token, *([peek] if peek else []),
        )  # fmt: skip

    def _peek(self, sequence: Sequence) -> int:
        assert self.prefix is not None
        return self.prefix.peek(self._requests[sequence.request].namespace, sequence.tokens)

    def _start(self, span: SpanPlan) -> SpanPlan:
        """Take the span's blocks; a sequence that holds none yet first gets those of its known prefix."""
        sequence, rows = span
        timings = self._requests[sequence.request].timings
        if not sequence.blocks:
            if timings.started is None:
                timings.started = time.perf_counter()
            if self.prefix is not None:
                blocks, sequence.node = self.prefix.match(self._requests[sequence.request].namespace, sequence.tokens)
                sequence.blocks, sequence.computed = blocks, len(blocks) * BLOCK_SLOTS
                if not sequence.preemptions:
                    sequence.cached = sequence.computed
                    timings.cached_tokens = max(timings.cached_tokens, sequence.computed)
        sequence.blocks.extend(self.pool.take(blocks_needed(sequence, sequence.computed + rows)))
        return SpanPlan(sequence, rows)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks away; what the prefix cache does not keep has to be computed again."""
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.computed, sequence.node = [], 0, None
        sequence.preemptions += 1
        self.preemptions += 1
        self._requests[sequence.request].timings.preemptions += 1

    def _remember(self, sequence: Sequence) -> None:
        """Put blocks that have become full into the prefix cache."""
        assert self.prefix is not None
        known = sequence.node.depth if sequence.node is not None else 0
        for index in range(known, sequence.computed // BLOCK_SLOTS):
            key = tuple(sequence.tokens[index * BLOCK_SLOTS : (index + 1) * BLOCK_SLOTS])
            namespace = self._requests[sequence.request].namespace
            sequence.node, sequence.blocks[index] = self.prefix.extend(
                namespace, sequence.node, key, sequence.blocks[index]
            )

    @property
    def accounting(self) -> Accounting:
        """What the steps so far did and where their seconds went."""
        return self._accounts.accounting

    @property
    def cost(self) -> CostModel | None:
        """What steps cost, as of now."""
        return self._accounts.cost

    def exclude(self, seconds: float) -> None:
        """Leave so much of the time until the next step out of the accounts: the caller measured something."""
        self._accounts.exclude(seconds)

    def run(self, number: int) -> Iterator[Chunk]:
        """Step until the request has ended, yielding its chunks."""
        request = self._requests.get(number)
        while request is not None and request.open:
            for chunk in self.step():
                if chunk.request == number:
                    yield chunk

    def check(self) -> None:
        """Raise ValueError if blocks were leaked or are wrongly shared."""
        self.pool.check([s.blocks for s in self._sequences], self.prefix.blocks() if self.prefix else ())

    def _rows(self, spans: list[SpanPlan]) -> Rows:
        """The spans' rows, column by column: most steps have one row, and are short."""
        owners: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        parents: list[int] = []
        logit_rows: list[int] = []
        for index, (sequence, count) in enumerate(spans):
            start, end = sequence.computed, sequence.computed + count
            first = len(owners)
            owners += [index] * count
            tokens += sequence.tokens[start:end]
            positions += range(start, end)
            slots += [sequence.slot(position) for position in range(start, end)]
            parents += [-1, *range(first, first + count - 1)]
            if end == len(sequence.tokens):
                logit_rows.append(first + count - 1)
        columns = (owners, tokens, positions, slots, parents)
        return Rows.of_columns(columns, logit_rows, [sequence.blocks for sequence, _ in spans])

    def _accept(self, sequence: Sequence, drawn: Drawn, index: int) -> Chunk:
        token = int(drawn.token[index])
        request = self._requests[sequence.request]
        request.timings.generated += 1
        if request.timings.first_token is None:
            request.timings.first_token = time.perf_counter()
        if sequence.choice == 0 and sequence.generated == 0:
            self._fork(sequence)
        sequence.append(token)
        chunk = request.outputs[sequence.choice].add(token, _logprob(sequence, drawn, index))
        if chunk.finish_reason is not None:
            self._end(sequence)
        return chunk

    def _fork(self, first: Sequence) -> None:
        """Let the other choices of a request start from its prompt: full blocks are shared, the last one copied.

        Each computes the prompt's last token again, in a block of its own, to draw from. Where there is no block
        to copy into, it waits for its turn like anybody else.
        """
        full, rest = divmod(first.prompt_length - 1, BLOCK_SLOTS)
        pairs = []
        for sequence in [s for s in self._sequences if s.waits_for is first]:
            sequence.waits_for = None
            if self.pool.available < full + 1:
                continue
            self.pool.share(first.blocks[:full])
            sequence.blocks, sequence.computed = first.blocks[:full], full * BLOCK_SLOTS
            sequence.node = first.node if first.node is not None and first.node.depth == full else None
            if self.prefix is not None and sequence.node is None and full:
                sequence.node = self.prefix.find(self._requests[sequence.request].namespace, sequence.tokens, full)
            if rest and self.pool.available:
                sequence.blocks.extend(self.pool.take(1))
                pairs.append((first.blocks[full], sequence.blocks[full]))
                sequence.computed += rest
        if pairs:
            self.model.executable.copy_blocks(np.array(pairs, np.int32))

    def _drop(self, sequence: Sequence, reason: FinishReason) -> Chunk:
        self._end(sequence)
        return Chunk(sequence.request, sequence.choice, "", finish_reason=reason)

    def _end(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.node = [], None
        for other in self._sequences:
            if other.waits_for is sequence:
                other.waits_for = None
        if all(other.tenant != sequence.tenant for other in self._sequences):
            self.served.pop(sequence.tenant, None)
        request = self._requests[sequence.request]
        request.open.discard(sequence.choice)
        if not request.open:
            request.timings.finished = time.perf_counter()
            del self._requests[sequence.request]


def _block_price(cost: CostModel, kv_bytes: int) -> Callable[[int], float]:
    """Seconds of computing the block at a depth (from 1) again, as part of a prompt."""

    @cache
    def seconds(depth: int) -> float:
        start = (depth - 1) * BLOCK_SLOTS
        context = BLOCK_SLOTS * start + BLOCK_SLOTS * (BLOCK_SLOTS + 1) // 2
        return cost.seconds(StepShape(BLOCK_SLOTS, 0, (start + BLOCK_SLOTS) * kv_bytes, context))

    return seconds


def _logprob(sequence: Sequence, drawn: Drawn, index: int) -> TokenLogprob | None:
    if sequence.params.logprobs is None:
        return None
    count = 1 + sequence.params.logprobs
    tokens, values = drawn.tokens[index, :count], drawn.logprobs[index, :count]
    pairs = [(int(t), float(v)) for t, v in zip(tokens, values, strict=True)]
    return TokenLogprob(*pairs[0], tuple(pairs[1:]))
