"""The loop that joins the layers: plan a step, run it, hand out what was drawn."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf

from slipstream.engine.accounts import StepAccounts
from slipstream.engine.admission import check_request, sequences_of
from slipstream.engine.drafting import Drafting
from slipstream.engine.flight import Flight, Forecast
from slipstream.engine.grammar import Grammars
from slipstream.engine.holdings import Holdings
from slipstream.engine.model import Model, core_to_spare
from slipstream.engine.output import (
    Chunk,
    FinishReason,
    OutputState,
    TokenLogprob,
    logprob_of,
    logprobs_of,
)
from slipstream.engine.redraw import redraw_forbidden
from slipstream.engine.request import Request, Terms, Timings
from slipstream.engine.shelving import Shelving
from slipstream.errors import SlipstreamError
from slipstream.kvcache import BlockPool, PrefixCache, Shelf
from slipstream.program import BLOCK_SLOTS, Draft, Rows
from slipstream.program.sampling import DrawColumns, SamplingParams
from slipstream.roofline.accounting import Accounting
from slipstream.roofline.cost import CostModel
from slipstream.scheduling import Limits, Offer, Plan, Sequence, SpanPlan, State, schedule
from slipstream.speculation import Controller, Verification

Planner = Callable[[State], Plan]
SHELVE_EVERY = 64
"""Steps of an engine that is always busy between two blocks that are put on the shelf."""


class Engine:
    """Runs requests on one model, many at once. Not safe for use by two threads at once."""

    def __init__(
        self,
        model: Model,
        cost: CostModel | None = None,
        planner: Planner = schedule,
        limits: Limits | None = None,
        prefix_cache: bool = True,
        ahead: bool | None = None,
        controller: Controller | None = None,
        verification: Verification | None = None,
    ):
        """`cost` prices steps and is kept true by the steps that are run; `planner` chooses their rows.

        With `ahead` a step is planned while the one before it runs, which pays where there is a core for it beside the
        kernels' threads, and is the default there. Tokens are the same either way. With a `controller` answers are
        drafted where that pays by `cost`, and drafts verified by `verification` (default: exact).
        """
        self.model, self.planner = model, planner
        self.ahead = core_to_spare(model) if ahead is None else ahead
        self.limits = limits or Limits(model.max_rows)
        self._accounts = StepAccounts(model, cost)
        self.last_step: tuple[Rows, DrawColumns | None] | None = None
        """What the last step was given; running it again changes nothing."""
        self._holdings = Holdings(
            model.executable, model.blocks, model.spare_blocks, cost, model.cache.bytes_per_token,
            controller.neural if controller is not None else None,
        )  # fmt: skip
        self.drafting = Drafting(controller, verification, self._holdings, model.config.vocabulary)
        if not prefix_cache:
            self._holdings.prefix = None
        self.grammars = Grammars(model.tokenizer, model.config.vocabulary)
        self.timings: dict[int, Timings] = {}
        self.preemptions = 0
        """Times that a sequence lost its blocks, since the start."""
        self.saved = 0
        """How many of those were moved out of the cache."""
        self.served: dict[str, float] = {}
        """Rows that each tenant with an open request has had."""
        self._sequences: list[Sequence] = []
        self._borrowed: list[list[int]] = []
        self._requests: dict[int, Request] = {}
        self._outputs: dict[int, OutputState] = {}  # by id of the sequence
        self._flights: deque[Flight] = deque()
        self._steady: Flight | None = None
        self._next_request = self._steps = self._shelved = 0

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished, or a step under way."""
        return bool(self._sequences or self._flights)

    @property
    def sequences(self) -> SequenceOf[Sequence]:
        """Unfinished sequences in order of arrival; not to be changed."""
        return self._sequences

    @property
    def pool(self) -> BlockPool:
        """The cache's blocks."""
        return self._holdings.pool

    @property
    def spare(self) -> BlockPool:
        """Blocks for what is moved out of the cache."""
        return self._holdings.spare

    @property
    def prefix(self) -> PrefixCache | None:
        """The prefix cache, if there is one."""
        return self._holdings.prefix

    @property
    def controller(self) -> Controller | None:
        """What decides about drafts, if anything does."""
        return self.drafting.controller

    @property
    def accounting(self) -> Accounting:
        """What the steps so far did and where their seconds went."""
        return self._accounts.accounting

    @property
    def cost(self) -> CostModel | None:
        """What steps cost, as of now."""
        return self._accounts.cost

    def add(
        self, prompt: list[int], params: SamplingParams, terms: Terms | None = None, number: int | None = None
    ) -> int:
        """Queue a request and return its number, which may be the caller's own: one that no other has or had.

        Raises UsageError if it can never run.
        """
        terms = terms or Terms()
        check_request(self.model, self.pool.size, prompt, params)
        if not self._sequences:
            self._accounts.woken()
        now = time.perf_counter()
        arrived = now if terms.asked is None else min(terms.asked, now)
        if number is None:
            number, self._next_request = self._next_request, self._next_request + 1
        # A tenant that was away does not come back with a claim on all it did not use.
        least = min((self.served[s.tenant] for s in self._sequences), default=0.0)
        self.served[terms.tenant] = max(self.served.get(terms.tenant, 0.0), least)
        request = Request(Timings(arrived, len(prompt), choices=params.n), set(range(params.n)))
        for sequence in sequences_of(self.model, number, prompt, params, terms, arrived):
            if params.grammar:
                sequence.constraint = self.grammars.constraint(params.grammar, terms.whose)
            self.drafting.place(sequence)
            self._holdings.name(sequence)
            self._outputs[id(sequence)] = OutputState(sequence, self.model.tokenizer)
            self._sequences.append(sequence)
        self._steady = None
        self._requests[number] = request
        self.timings[number] = request.timings
        return number

    def cancel(self, number: int) -> None:
        """Drop a request; its blocks are free at once."""
        for sequence in [s for s in self._sequences if s.request == number]:
            self._end(sequence)

    def use(self, controller: Controller | None) -> None:
        """Let other drafters draft from now on, also for answers under way. They must need what the last ones did."""
        if self._flights:
            raise SlipstreamError("a step is under way")
        for sequence in self._sequences:
            self.drafting.free(sequence)
        self.drafting.controller = controller
        self._holdings.follow(controller.neural if controller is not None else None, self._sequences)

    @property
    def flying(self) -> bool:
        """Whether a step is under way."""
        return bool(self._flights)

    def roll_out(self, controller: Controller | None, model: Model, *, ahead: bool = False) -> None:
        """Go on with a rollout, which lets a candidate look on or draft beside the present drafter, or end one.

        `model` is this engine's own with the hidden states that are read handed out. No step may be under way.
        """
        if self._flights:
            raise SlipstreamError("a step is under way")
        self.model, self.ahead, self._steady = model, ahead, None
        self.drafting.controller = controller
        self._holdings.roll_out(model.executable, controller.neural if controller is not None else None)

    def step(self) -> list[Chunk]:
        """See a step through and return its news, in the order of the sequences. The next one may be under way then."""
        chunks = [] if self._flights else self._launch()
        if self._flights and self.ahead and self.drafting.unforeseen(self._flights[0]):
            chunks += self._launch()
        return chunks + self._land() if self._flights else chunks

    def run(self, number: int) -> Iterator[Chunk]:
        """Step until the request has ended, yielding its chunks."""
        request = self._requests.get(number)
        while request is not None and request.open:
            for chunk in self.step():
                if chunk.request == number:
                    yield chunk
        while self._flights and not self._sequences:
            self.step()

    def settle(self) -> None:
        """Wait until no step runs; what it drew is handed out by the next call of `step`."""
        self.model.executable.wait()

    def seconds_left(self) -> float:
        """How long the step under way is still expected to run; 0 if there is none, or nothing to tell by."""
        cost = self._accounts.snapshot
        if not self._flights or cost is None:
            return 0.0
        flight = self._flights[-1]
        if flight.expected is None:
            flight.expected = cost.seconds(flight.shape(self.model.cache))
        return max(0.0, max(flight.planned, self._accounts.landed) + flight.expected - time.perf_counter())

    def keep_blocks(self, shelf: Shelf) -> None:
        """Put cached blocks on a shelf when there is time (`shelve`), and look there for what prompts begin with."""
        if self.prefix is not None:
            self._holdings.shelving = Shelving(shelf, self.model.executable, self.pool, self.prefix)

    @property
    def shelving(self) -> bool:
        """Whether there are cached blocks to be put on the shelf, and it is time for one: now and then even if busy."""
        shelving = self._holdings.shelving
        if shelving is None or not shelving.waiting:
            return False
        return not self.busy or self._steps - self._shelved >= SHELVE_EVERY

    def shelve(self) -> None:
        """Put one cached block on the shelf."""
        self._shelved = self._steps
        self.settle()
        self._holdings.shelve()

    def borrow(self, count: int) -> list[int]:
        """So many blocks for somebody who computes in them between two steps."""
        blocks = self.pool.take(count)
        self._borrowed.append(blocks)
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        """Blocks that were borrowed."""
        if blocks:
            self._borrowed.remove(blocks)
            self.pool.release(blocks)

    def check(self) -> None:
        """Raise ValueError if blocks were leaked or are wrongly shared."""
        self._holdings.check(self._sequences, self._borrowed)

    def exclude(self, seconds: float) -> None:
        """Leave so much of the time until the next step out of the accounts: the caller measured something."""
        self._accounts.exclude(seconds)

    def _launch(self) -> list[Chunk]:
        """Plan a step and start it; returns news of sequences that the plan ends."""
        begun = time.perf_counter()
        steady, cost = self._steady is not None, self._accounts.snapshot
        offers, draft_pass = self.drafting.offers(self._sequences, cost, bool(self._flights), steady)
        if not offers and self._steady is not None and self._repeat(self._steady, begun):
            return []
        plan = self.planner(self._state(offers, draft_pass))
        chunks = [self._drop(sequence, "length") for sequence in plan.too_large if not sequence.unknown]
        chunks += [self._drop(sequence, "abort") for sequence in plan.expired]
        for sequence in plan.preempted:
            self._preempt(sequence, save=sequence in plan.saved)
        for span in plan.spans:  # most decodes have room in their last block
            sequence, rows, most = span
            if sequence.computed + rows + most > len(sequence.blocks) * BLOCK_SLOTS:
                self._take(span)
        for sequence, rows, most in plan.spans:
            if most and (scratch := self.drafting.scratch(most)):
                self._holdings.make_room(sequence, rows + most + scratch)
        if not plan.spans:
            if self._sequences and not (chunks or plan.preempted or self._flights or self._borrowed):
                raise SlipstreamError("no sequence can run: the cache is too small")
            return chunks
        drafts, drafting = self.drafting.drafts(plan)
        flight = Flight.of(plan.spans, begun, drafts, late=not (drafts and self.drafting.wants_logits))
        if drafts:
            flight.forecast = Forecast(plan.plain, plan.speedup, drafting, plan.extra)
        self.last_step = flight.rows, flight.draws
        flight.depart()
        for sequence, rows, _ in plan.spans:
            self.served[sequence.tenant] += rows
            if rows > 1 or self._holdings.drafter is not None or not sequence.computed % BLOCK_SLOTS:
                self._holdings.remember(sequence)
        self._depart(flight)
        return chunks

    def _repeat(self, flight: Flight, begun: float) -> bool:
        """Let the last plan hold for another step; whether that is possible. The planner would say the same."""
        assert flight.output is not None
        assert flight.output.drawn is not None
        if self.pool.available < len(flight.drawing) or begun >= flight.deadline:
            return False
        flight.repeat(flight.output.drawn, begun, self._holdings.take)
        self.last_step = flight.rows, flight.draws
        for tenant, rows in flight.tenants.items():
            self.served[tenant] += rows
        self._depart(flight)
        return True

    def _depart(self, flight: Flight) -> None:
        flight.planned = time.perf_counter()
        self._steps += 1
        if self.ahead and not (flight.drafts and self.drafting.wants_logits):
            flight.output = None
            self.model.executable.submit(flight.rows, flight.draws)
        else:
            logits = bool(flight.drafts) and self.drafting.wants_logits
            flight.output = self.model.executable.step(flight.rows, flight.draws, logits=logits)
        self._flights.append(flight)

    def _land(self) -> list[Chunk]:
        """Take the oldest step's outcome: its tokens become known."""
        flight = self._flights.popleft()
        output = flight.output = flight.output or self.model.executable.collect()
        ran = time.perf_counter()
        if flight.unmasked:
            redraw_forbidden(flight, self.model.executable)
        unwanted = flight.unwanted()
        chunks: list[Chunk] = []
        self.drafting.computed(flight)
        if (drawn := output.drawn) is not None:
            tokens = drawn.token.tolist()
            for first, sequence in zip(flight.firsts, flight.drawing, strict=True):
                if flight.drafts and (draft := flight.drafts.get(id(sequence))) is not None:
                    chunks += self._verify(flight, sequence, draft, first, tokens, ran)
                elif not sequence.ended:
                    logprobs = () if sequence.params.logprobs is None else logprobs_of(sequence, drawn, first)
                    chunks.append(self._accept(sequence, tokens[first], logprobs, ran))
                    if flight.drafts:
                        flight.tokens.append(1)
                elif flight.drafts:
                    flight.tokens.append(0)
        self.drafting.step_landed(flight)
        self._steady = flight if self._holds(flight) else None
        self._accounts.end(flight, unwanted, ran, bool(self._sequences))
        return chunks

    def _verify(
        self, flight: Flight, sequence: Sequence, draft: Draft, first: int, drawn: list[int], ran: float
    ) -> list[Chunk]:
        """Take what a verification came to: its tokens become known one by one, and the answer may end at any."""
        output = flight.output
        assert output is not None
        assert output.drawn is not None
        if sequence.ended:
            flight.tokens.append(0)
            return []
        held, tokens = self.drafting.verify(flight, sequence, draft, first, drawn)
        chunks: list[Chunk] = []
        for place, token in enumerate(tokens):
            row = first + (1 + held[place - 1] if place else 0)
            logprobs: tuple[TokenLogprob, ...] = ()
            if sequence.params.logprobs is not None:
                logprobs = logprobs_of(sequence, output.drawn, row)
                if output.logits is not None and token != drawn[row]:  # by rejection, what comes out was not drawn here
                    logprobs = (TokenLogprob(token, logprob_of(token, output.logits[row]), logprobs[0].top),)
            sequence.computed += place < len(held)
            sequence.unknown += place > 0
            chunks.append(self._accept(sequence, token, logprobs, ran))
            if chunks[-1].finish_reason is not None:
                break
        flight.tokens.append(len(chunks))
        held, ended = held[: len(chunks)], chunks[-1].finish_reason is not None
        tried = self.drafting.landed(sequence, draft, held, ended=ended)
        self.timings[sequence.request].drafts.add(len(draft), len(held), tried)
        return chunks

    def _holds(self, flight: Flight) -> bool:
        """Whether the next step is the same, a token further: nobody came, went or waits."""
        everybody = len(self._sequences) == len(flight.drawing) and not any(s.ended for s in flight.drawing)
        return flight.repeatable and everybody and not self.ahead and self.planner is schedule

    def _state(self, offers: Mapping[int, Offer] | None = None, draft_pass: float = 0.0) -> State:
        return State(
            time.perf_counter(), self._sequences, self.pool, self.limits, self.served, self._accounts.snapshot,
            self.model.cache.bytes_per_token, self._holdings.peek, self.spare.free, offers or {}, draft_pass,
            self.controller.dearness if self.controller is not None else 1.0,
        )  # fmt: skip

    def _take(self, span: SpanPlan) -> None:
        sequence, rows, drafts = span
        timings = self._requests[sequence.request].timings
        if not sequence.blocks and timings.started is None:
            timings.started = time.perf_counter()
        self._holdings.take(sequence, rows + drafts)
        timings.cached_tokens = max(timings.cached_tokens, sequence.cached)

    def _preempt(self, sequence: Sequence, *, save: bool) -> None:
        self._holdings.preempt(sequence, save=save)
        self.preemptions += 1
        self.saved += save
        self._requests[sequence.request].timings.preemptions += 1

    def _accept(self, sequence: Sequence, token: int, logprobs: tuple[TokenLogprob, ...], now: float) -> Chunk:
        # Right after the kernels little of this is in the processor's caches: the fewer objects it looks at the better.
        output, tokens = self._outputs[id(sequence)], sequence.tokens
        if len(tokens) == sequence.prompt_length:
            self._begin(sequence, now)
        sequence.unknown -= 1
        if output.simple:
            tokens.append(token)
        else:
            sequence.append(token)
        if not min(sequence.computed, len(tokens)) % BLOCK_SLOTS:
            self._holdings.remember(sequence)
        chunk = output.add(token, logprobs)
        if chunk.finish_reason is not None:
            self._end(sequence)
        return chunk

    def _begin(self, sequence: Sequence, now: float) -> None:
        """The first token of an answer is known."""
        timings = self._requests[sequence.request].timings
        timings.first_token = timings.first_token or now
        if sequence.choice == 0 and timings.choices > 1:
            self._holdings.fork(sequence, [s for s in self._sequences if s.waits_for is sequence])

    def _drop(self, sequence: Sequence, reason: FinishReason) -> Chunk:
        self._end(sequence)
        return Chunk(sequence.request, sequence.choice, "", finish_reason=reason)

    def _end(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        self._steady = None
        self._holdings.release(sequence)
        sequence.ended = True
        self.drafting.free(sequence)
        for other in self._sequences:
            if other.waits_for is sequence:
                other.waits_for = None
        if all(other.tenant != sequence.tenant for other in self._sequences):
            self.served.pop(sequence.tenant, None)
        del self._outputs[id(sequence)]
        request = self._requests[sequence.request]
        request.timings.generated += sequence.generated
        request.open.discard(sequence.choice)
        if not request.open:
            request.timings.finished = time.perf_counter()
            del self._requests[sequence.request]
