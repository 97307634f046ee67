"""The loop that joins the layers: plan a step, run it, hand out what was drawn."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from slipstream.engine.accounts import StepAccounts
from slipstream.engine.model import Model
from slipstream.engine.output import Chunk, OutputState, TokenLogprob
from slipstream.errors import SlipstreamError, UsageError
from slipstream.kvcache import BlockPool
from slipstream.program import BLOCK_SLOTS, Rows
from slipstream.program.sampling import DrawColumns, Drawn, SamplingParams
from slipstream.roofline.accounting import Accounting
from slipstream.roofline.cost import CostModel
from slipstream.scheduling import Plan, Sequence, schedule

Planner = Callable[[SequenceOf[Sequence], BlockPool, int], Plan]


@dataclass
class Timings:
    """Seconds and tokens of one request; None until it happened."""

    arrived: float
    prompt_tokens: int
    first_token: float | None = None
    finished: float | None = None
    generated: int = 0

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


@dataclass
class _Request:
    timings: Timings
    outputs: dict[int, OutputState]
    open: set[int] = field(default_factory=set)


class Engine:
    """Runs requests on one model, several at once. Not safe for use by two threads at once."""

    def __init__(self, model: Model, cost: CostModel | None = None, planner: Planner = schedule):
        """`cost` prices steps and is kept true by the steps that are run; `planner` chooses their rows."""
        self.model, self.planner = model, planner
        self._accounts = StepAccounts(model, cost)
        self.last_step: tuple[Rows, DrawColumns | None] | None = None
        """What the last step was given; running it again changes nothing."""
        self.pool = BlockPool(model.blocks)
        self.timings: dict[int, Timings] = {}
        self._sequences: list[Sequence] = []
        self._requests: dict[int, _Request] = {}
        self._next_request = 0

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._sequences)

    def add(self, prompt: list[int], params: SamplingParams) -> int:
        """Queue a request and return its number. Raises UsageError if it can never run."""
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
        if not self.busy:
            self._accounts.woken()
        number, self._next_request = self._next_request, self._next_request + 1
        seed = secrets.randbits(64) if params.seed is None else params.seed
        first: Sequence | None = None
        request = _Request(Timings(time.perf_counter(), len(prompt)), {}, set(range(params.n)))
        for choice in range(params.n):
            sequence = Sequence(
                number, choice, list(prompt), len(prompt), params, seed, self.model.eos, waits_for=first
            )
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
        plan = self.planner(self._sequences, self.pool, self.model.max_rows)
        chunks = [self._refuse(sequence) for sequence in plan.too_large]
        if not plan.spans:
            if self._sequences and not chunks:
                raise SlipstreamError("no sequence can run: the cache is too small")
            return chunks
        drawing = [s.sequence for s in plan.spans if s.rows == s.sequence.missing]
        draws = DrawColumns.of([sequence.draw() for sequence in drawing])
        rows = self._rows(plan)
        accounts.planned(plan.spans)
        self.last_step = rows, draws if drawing else None
        output = self.model.executable.step(*self.last_step)
        accounts.ran()
        for span in plan.spans:
            span.sequence.computed += span.rows
        if output.drawn is not None:
            for index, sequence in enumerate(drawing):
                chunks.append(self._accept(sequence, output.drawn, index))
        accounts.end(self.busy)
        return chunks

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
        self.pool.check([sequence.blocks for sequence in self._sequences])

    def _rows(self, plan: Plan) -> Rows:
        """The plan's rows, column by column: most steps have one row, and are short."""
        owners: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        parents: list[int] = []
        logit_rows: list[int] = []
        for index, (sequence, count) in enumerate(plan.spans):
            start, end = sequence.computed, sequence.computed + count
            first = len(owners)
            owners += [index] * count
            tokens += sequence.tokens[start:end]
            positions += range(start, end)
            slots += [sequence.slot(position) for position in range(start, end)]
            parents += [-1, *range(first, first + count - 1)]
            if end == len(sequence.tokens):
                logit_rows.append(first + count - 1)
        return Rows.of_columns(
            (owners, tokens, positions, slots, parents), logit_rows, [span.sequence.blocks for span in plan.spans]
        )

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
        """Let the other choices of a request start from its prompt: full blocks are shared.

        Each computes the prompt's last token again, in a block of its own, to draw from.
        """
        for sequence in [s for s in self._sequences if s.waits_for is first]:
            sequence.waits_for = None
            shared = (first.prompt_length - 1) // BLOCK_SLOTS
            self.pool.share(first.blocks[:shared])
            sequence.blocks = first.blocks[:shared]
            sequence.computed = shared * BLOCK_SLOTS

    def _refuse(self, sequence: Sequence) -> Chunk:
        self._end(sequence)
        return Chunk(sequence.request, sequence.choice, "", finish_reason="length")

    def _end(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        for other in self._sequences:
            if other.waits_for is sequence:
                other.waits_for = None
        request = self._requests[sequence.request]
        request.open.discard(sequence.choice)
        if not request.open:
            request.timings.finished = time.perf_counter()
            del self._requests[sequence.request]


def _logprob(sequence: Sequence, drawn: Drawn, index: int) -> TokenLogprob | None:
    if sequence.params.logprobs is None:
        return None
    count = 1 + sequence.params.logprobs
    tokens, values = drawn.tokens[index, :count], drawn.logprobs[index, :count]
    pairs = [(int(t), float(v)) for t, v in zip(tokens, values, strict=True)]
    return TokenLogprob(*pairs[0], tuple(pairs[1:]))
