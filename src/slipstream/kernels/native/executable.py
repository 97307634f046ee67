"""NativeBackend and NativeExecutable: packed weights, the cache and the compiled program."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipstream import __version__
from slipstream.errors import UsageError
from slipstream.kernels.backend import Int32Array, StepOutput, Worth, checked_inputs
from slipstream.kernels.native import _native
from slipstream.kernels.native.cache import CacheArena
from slipstream.kernels.native.compile import Compiler, Operands
from slipstream.kernels.native.pack_cache import PackCache, cache_key, layout
from slipstream.kernels.native.packing import LAYOUT, Packing, Quantization, pack, plan
from slipstream.models.weights import WeightSource
from slipstream.program import BLOCK_SLOTS, Program, Rows, ops
from slipstream.program.op_classes import OP_CLASSES
from slipstream.program.sampling import DrawColumns, Drawn

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]

MAX_ROWS = 512
ACTIVATION_RULE = "int8 symmetric, groups of 32"


def default_threads() -> int:
    """SLIPSTREAM_THREADS, or the cores this process may use."""
    named = os.environ.get("SLIPSTREAM_THREADS")
    if not named:
        return _native.usable_cores()
    if not named.isdigit() or not int(named) >= 1:
        raise UsageError(f"SLIPSTREAM_THREADS must be a positive number, not {named!r}")
    check_threads("SLIPSTREAM_THREADS", int(named))
    return int(named)


def check_threads(name: str, threads: int) -> None:
    """Raise UsageError for more threads than the cores that this process may use: they would only wait for them."""
    if threads > (cores := _native.usable_cores()):
        raise UsageError(f"{name} is {threads}, but this process may use {cores} cores")


def instruction_set() -> str:
    """The instruction set in use. Raises UsageError if SLIPSTREAM_ISA names one that there is not."""
    try:
        return _native.isa()
    except RuntimeError as error:
        raise UsageError(f"SLIPSTREAM_ISA: {error}") from error


@cache
def build() -> str:
    """Names the build of the kernels: another one may compute other bits."""
    return hashlib.sha256(Path(_native.__file__).read_bytes()).hexdigest()[:8]


_SECONDS = len(OP_CLASSES) + 3
_NO_COPIES = np.empty((0, 2), np.int32)
_NOTHING_DRAWN = Drawn(np.empty((0, 1), np.int32), np.empty((0, 1), np.float32))


def native_draws(draws: DrawColumns) -> _native.Draws:
    """The draws as the executor takes them: the same arrays."""
    return _native.Draws(
        draws.ints, draws.floats, draws.seed, draws.adjust_start, draws.adjust_token, draws.adjust_value,
        draws.mask_of, draws.masks,
    )  # fmt: skip


class NativeExecutable:
    """A compiled program. Not safe for use by two threads at once."""

    def __init__(
        self,
        program: Program,
        operands: Operands,
        threads: int,
        max_rows: int,
        packings: list[Packing],
        stored_bytes: int,
        share: NativeExecutable | None = None,
    ):
        """With `share` the threads are those of another executable, which never runs at the same time."""
        self.program, self.operands, self.packings = program, operands, packings
        self.stored_bytes = stored_bytes
        shared: _native.Executor | None = share.executor if share is not None else None
        self.executor: _native.Executor = _native.Executor(threads, max_rows, shared)
        arena = operands.cache
        self.executor.set_cache(arena.data, arena.block_bytes, arena.blocks - arena.spare, arena.spare)
        Compiler(program, operands, self.executor).compile()
        taps = [(op.name, program.widths[op.x]) for op in program.ops if isinstance(op, ops.Tap)]
        ends = list(accumulate(width for _, width in taps))
        self._taps = [(name, slice(end - width, end)) for (name, width), end in zip(taps, ends, strict=True)]
        self._tap_width = ends[-1] if ends else 0
        self._input_width = next((op.width for op in program.ops if isinstance(op, ops.Input)), 0)
        self._flights: deque[Drawn | None] = deque()
        self._copies = _NO_COPIES
        self._draws: tuple[DrawColumns, _native.Draws] | None = None

    def with_threads(self, threads: int) -> NativeExecutable:
        """The same weights and cache, run by another number of threads; never step both at once."""
        return NativeExecutable(self.program, self.operands, threads, self.max_rows, self.packings, self.stored_bytes)

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return instruction_set()

    @property
    def numerics(self) -> str:
        """Build, instruction set and activation rule."""
        return f"native-{__version__}-{build()}-layout{LAYOUT}-{self.isa}-{ACTIVATION_RULE}"

    @property
    def weight_bytes(self) -> int:
        """Packed bytes that a one-row step reads."""
        return self.executor.weight_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of activations and logits for the largest step."""
        return self.executor.buffer_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token must read at least: the smaller of stored and packed."""
        return min(self.stored_bytes, self.weight_bytes)

    @property
    def threads(self) -> int:
        """Threads that run a step."""
        return self.executor.threads

    @property
    def max_rows(self) -> int:
        """Most rows of a step."""
        return self.executor.max_rows

    @property
    def class_bytes(self) -> dict[str, float]:
        """Packed bytes that a step reads, by class of work."""
        return dict(zip(OP_CLASSES, self.executor.class_bytes, strict=True))

    def set_vocabulary(self, tokens: npt.NDArray[np.int32]) -> None:
        """The head's rows stand for these tokens, ascending: draws are given by them, and take their noise.

        Adjusted and masked tokens are given by row all the same.
        """
        self.executor.set_vocabulary(tokens)

    def read_weights(self, threads: int | None = None) -> float:
        """Seconds that reading all weights takes when nothing is computed: the ceiling's measure."""
        return self.executor.read_weights(threads or self.executor.threads)

    def sibling(self, program: Program) -> NativeExecutable:
        """Another program over the same weights, cache and threads; the two never run at the same time."""
        return NativeExecutable(
            program, self.operands, self.threads, self.max_rows, self.packings, self.stored_bytes, self
        )

    def step(
        self,
        rows: Rows,
        draws: DrawColumns | None,
        *,
        logits: bool = False,
        inputs: Float32Array | None = None,
    ) -> StepOutput:
        """Compute the rows; draw a token for every logit row if `draws` are given."""
        if self._input_width:
            self.executor.set_inputs(checked_inputs(inputs, len(rows), self._input_width))
        columns = (rows.columns, rows.block_tables, rows.logit_rows)
        drawn, seconds = None, np.empty(_SECONDS)
        self._copy()
        if draws is None or not len(rows.logit_rows):
            self.executor.step(*columns)
        else:
            drawn = Drawn.empty(draws)
            if self._draws is None or self._draws[0] is not draws:
                self._draws = draws, native_draws(draws)
            self.executor.step_sampled(*columns, self._draws[1], drawn.tokens, drawn.logprobs)
        scores = None
        if logits:
            scores = np.empty((len(rows.logit_rows), self.program.vocabulary), np.float32)
            self.executor.copy_logits(scores)
        self.executor.copy_seconds(seconds)
        if not self._taps:
            return StepOutput(drawn, scores, seconds=seconds)
        side_by_side = np.empty((len(rows), self._tap_width), np.float32)
        self.executor.copy_taps(side_by_side)
        taps = {name: side_by_side[:, place] for name, place in self._taps}
        return StepOutput(drawn, scores, taps, seconds, side_by_side)

    def redraw(self, rows: Int32Array, draws: DrawColumns) -> Drawn:
        """Logit rows of the last step, drawn again otherwise."""
        drawn = Drawn.empty(draws)
        self.executor.redraw(rows, native_draws(draws), drawn.tokens, drawn.logprobs)
        return drawn

    def follow(self, rows: Rows, draws: DrawColumns, inputs: Float32Array, slots: Int32Array, worth: Worth) -> Drawn:
        """A chain of draws, in one call."""
        if len(rows) != 1:
            raise ValueError("a chain begins with one row")
        self._copy()
        shape = (len(slots), 1 + draws.most_logprobs)
        tokens, logprobs = np.empty(shape, np.int32), np.empty(shape, np.float32)
        if self._draws is None or self._draws[0] is not draws:
            self._draws = draws, native_draws(draws)
        inputs = checked_inputs(inputs, 1, self._input_width)
        count = self.executor.follow(
            rows.columns, rows.block_tables, slots, self._draws[1], inputs, tokens, logprobs, worth.bounds,
            worth.chances, worth.alive, worth.price,
        )  # fmt: skip
        return Drawn(tokens[:count], logprobs[:count])

    def submit(self, rows: Rows, draws: DrawColumns | None) -> None:
        """Queue a step on the executor's own thread. Raises UsageError for a program with taps: they are not kept."""
        if self._taps or self._input_width:
            raise UsageError("the steps of a program with taps or inputs are run one at a time")
        drawn, native = _NOTHING_DRAWN, None
        if draws is not None and len(rows.logit_rows):
            drawn, native = Drawn.empty(draws), native_draws(draws)
        self.executor.submit(
            rows.columns, rows.block_tables, rows.logit_rows, native, drawn.tokens, drawn.logprobs, self._copies
        )
        self._flights.append(None if native is None else drawn)
        self._copies = _NO_COPIES

    def wait(self) -> None:
        """Until all submitted steps have run, and the blocks are copied that waited for them."""
        self.executor.wait()
        self._copy()

    def collect(self) -> StepOutput:
        """The outcome of the oldest step that was not collected. Raises IndexError if there is none."""
        drawn, seconds = self._flights[0], np.empty(_SECONDS)
        try:
            self.executor.collect(seconds)
        finally:
            self._flights.popleft()
        return StepOutput(drawn, seconds=seconds)

    def touch_blocks(self, blocks: npt.NDArray[np.int32]) -> None:
        """Commit blocks (their content is lost), so that what reads them can be timed."""
        self.operands.cache.touch(blocks)

    def forget_blocks(self) -> None:
        """Give the memory of all blocks back to the system; what they hold is lost. No step may be running."""
        self.operands.cache.decommit()

    def copy_blocks(self, pairs: npt.NDArray[np.int32]) -> None:
        """Copy blocks, pairs [n, 2] of (from, to) in order: at once, or before the next step if one is running."""
        self._copies = np.concatenate([self._copies, pairs])
        if not self._flights:
            self._copy()

    def copy_slots(self, pairs: npt.NDArray[np.int32]) -> None:
        """Copy single slots of all layers, pairs [n, 2] of (from, to) in order. No step may be running."""
        self._copy()
        self.executor.copy_slots(pairs)

    def _copy(self) -> None:
        if len(self._copies):
            self.executor.copy_blocks(self._copies)
            self._copies = _NO_COPIES


def _stored_bytes(program: Program, weights: WeightSource) -> int:
    """Bytes in the model file of the matrices that a one-row step reads."""
    total = 0
    for use in program.weights.values():
        if use.role == "matrix":
            stored = weights.stored(use, program.shard)
            numbers = use.shape[0] * use.shape[1]
            total += stored.tensor.type.nbytes(numbers) if stored else numbers * 4
    return total


class NativeBackend:
    """Packs weights (or finds them packed) and compiles programs for this processor."""

    name = "native"

    def __init__(
        self,
        threads: int | None = None,
        max_rows: int = MAX_ROWS,
        quantization: Quantization = "none",
        files: tuple[Path, ...] = (),
        progress: Progress | None = None,
        requantize: bool = False,
        share: NativeExecutable | None = None,
        matrices: Mapping[str, _native.Matrix] | None = None,
    ):
        """`files` are the weights' own, for the pack cache's key; without them nothing is cached.

        `progress` is called with packed bytes and their total. With `requantize`, weights that are quantised already
        are quantised anew. With `share` the threads are those of another executable, which never runs at the same time.
        `matrices` are packed already, by the program's names.
        """
        instruction_set()
        self.threads = threads or default_threads()
        self.max_rows, self.quantization = max_rows, quantization
        self.files, self.progress = files, progress
        self.requantize, self.share, self.matrices = requantize, share, matrices or {}

    def compile(self, program: Program, weights: WeightSource, blocks: int, spare: int = 0) -> NativeExecutable:
        """Load the weights and set up a cache of `blocks` blocks, and `spare` ones after them for copies only."""
        if program.shard.size > 1:
            raise UsageError("the native backend runs whole models; a shard plan of 1 is needed")
        packings = [
            plan(use, weights, program.shard, self.quantization, self.requantize)
            for use in program.weights.values()
            if use.role != "vector" and use.name not in self.matrices
        ]
        matrices = {**self.matrices, **self._matrices(packings, weights, program)}
        vectors = {
            use.name: weights.float32(use, program.shard) for use in program.weights.values() if use.role == "vector"
        }
        cache = CacheArena.allocate(program.cache, blocks, spare)
        operands = Operands(matrices, vectors, cache, blocks * BLOCK_SLOTS)
        stored = _stored_bytes(program, weights)
        return NativeExecutable(program, operands, self.threads, self.max_rows, packings, stored, self.share)

    def _matrices(self, packings: list[Packing], weights: WeightSource, program: Program) -> dict[str, _native.Matrix]:
        offsets, size = layout(packings)
        shard = program.shard
        parts = {p.use.name: (offsets[p.use.name], p.nbytes) for p in packings}
        cache = (
            PackCache(cache_key(self.files, packings, (shard.rank, shard.size)), self.threads) if self.files else None
        )
        mapped = cache.load(size, parts) if cache else None
        data = _native.allocate(size) if mapped is None else mapped
        matrices = {
            p.use.name: _native.Matrix(p.format, p.use.shape[0], p.use.shape[1], data[at : at + nbytes])
            for p, (at, nbytes) in zip(packings, parts.values(), strict=True)
        }
        if mapped is not None:
            return matrices
        packer, done = _native.Packer(self.threads), 0
        for packing in packings:
            pack(packing, weights, shard, packer, matrices[packing.use.name])
            done += packing.nbytes
            if self.progress:
                self.progress(done, size)
        if cache:
            cache.save(data, parts)
        return matrices
