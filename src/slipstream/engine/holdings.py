"""Holdings: which cache blocks the sequences hold: taken, shared, given back, moved out of the cache and back.

What is copied is copied by the executable between the steps submitted before and those to come, so that blocks can
change hands while a step that still uses them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from functools import cache

import numpy as np

from slipstream.engine.shelving import Shelving
from slipstream.kernels import Executable
from slipstream.kvcache import BlockPool, PrefixCache
from slipstream.program import BLOCK_SLOTS, StepShape
from slipstream.roofline.cost import CostModel
from slipstream.scheduling import Sequence
from slipstream.scheduling.scheduler import blocks_needed
from slipstream.speculation import Drafter


class Holdings:
    """The blocks of an executable's cache and who holds them.

    `spare` are the blocks after the cache's own, for what is moved out; its block numbers count from 0.
    """

    def __init__(
        self,
        executable: Executable,
        blocks: int,
        spare: int,
        cost: CostModel | None,
        kv_bytes: int,
        drafter: Drafter | None = None,
    ):
        """`cost` and `kv_bytes` (of a token) price what the prefix cache gives up.

        A `drafter` keeps state of its own under the same block numbers. What it keeps at a position depends on the
        tokens up to there only, so that it is shared, copied and moved with the block; a block says whose state it
        holds.
        """
        self._executable, self.drafter = executable, drafter
        self.pool, self.spare = BlockPool(blocks), BlockPool(spare)
        self.shelving: Shelving | None = None
        self.prefix: PrefixCache | None = PrefixCache(self.pool, block_price(cost, kv_bytes) if cost else None)

    def name(self, sequence: Sequence) -> None:
        """To be told of a sequence that comes, or will have to start anew, before it is planned for."""
        if self.shelving is not None and not sequence.alone:
            self.shelving.name(sequence, self.drafter)

    def peek(self, sequence: Sequence) -> int:
        """Tokens of a sequence without blocks that the prefix cache knows; changes nothing."""
        if self.prefix is None or sequence.alone:
            return 0
        known = self.prefix.peek(sequence.namespace, sequence.tokens)
        return self.shelving.peek(sequence, known) if self.shelving is not None else known

    def take(self, sequence: Sequence, rows: int) -> None:
        """Give a sequence blocks for `rows` more tokens, after what it has elsewhere or the prefix cache knows."""
        if sequence.saved:
            self._restore(sequence)
        elif not sequence.blocks and self.prefix is not None and not sequence.alone:
            sequence.blocks, sequence.node = self.prefix.match(sequence.namespace, sequence.tokens)
            sequence.computed = len(sequence.blocks) * BLOCK_SLOTS
            if self.shelving is not None:
                self.shelving.fetch(sequence, self.drafter)
            if not sequence.preemptions:
                sequence.cached = sequence.computed
            if self.drafter is not None and sequence.node is not None:
                sequence.drafted = sequence.node.drafted(self.drafter.state_for(sequence)) * BLOCK_SLOTS
        sequence.blocks.extend(self.pool.take(blocks_needed(sequence, sequence.computed + rows)))

    def make_room(self, sequence: Sequence, rows: int) -> None:
        """Blocks for `rows` tokens after what is computed, if nobody has to give way for them.

        To be asked for when everybody in the step has his: what he was promised may be the last there is.
        """
        if (more := blocks_needed(sequence, sequence.computed + rows)) <= self.pool.free:
            sequence.blocks.extend(self.pool.take(more))

    def shelve(self) -> None:
        """Put one cached block on the shelf."""
        assert self.shelving is not None
        self.shelving.put_one(self.drafter)

    def release(self, sequence: Sequence) -> None:
        """Take everything away from a sequence."""
        self.pool.release(sequence.blocks)
        self._release_saved(sequence)
        sequence.blocks, sequence.node = [], None

    def preempt(self, sequence: Sequence, *, save: bool) -> None:
        """Take a sequence's blocks away; they are moved out of the cache, or have to be computed again."""
        if save:
            sequence.saved = self.spare.take(len(sequence.blocks))
            self._copy(zip(sequence.blocks, (self.pool.size + block for block in sequence.saved), strict=True))
        else:
            sequence.computed = sequence.drafted = 0
            self.name(sequence)
            if self.drafter is not None:
                self.drafter.free(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.node = [], None
        sequence.preemptions += 1

    def _restore(self, sequence: Sequence) -> None:
        sequence.blocks = self.pool.take(len(sequence.saved))
        self._copy(zip((self.pool.size + block for block in sequence.saved), sequence.blocks, strict=True))
        self._release_saved(sequence)

    def _release_saved(self, sequence: Sequence) -> None:
        self.spare.release(sequence.saved)
        sequence.saved = []

    def remember(self, sequence: Sequence) -> None:
        """Put blocks that are full of known tokens into the prefix cache."""
        if self.prefix is None or sequence.alone or not sequence.blocks:
            return
        known = sequence.node.depth if sequence.node is not None else 0
        for index in range(known, min(sequence.computed, len(sequence.tokens)) // BLOCK_SLOTS):
            key = tuple(sequence.tokens[index * BLOCK_SLOTS : (index + 1) * BLOCK_SLOTS])
            own = sequence.blocks[index]
            sequence.node, sequence.blocks[index] = self.prefix.extend(sequence.namespace, sequence.node, key, own)
            if self.drafter is not None and sequence.blocks[index] != own:
                self._swapped(sequence, index, self.drafter.state_for(sequence))
        if self.drafter is not None and sequence.node is not None:
            state, blocks = self.drafter.state_for(sequence), sequence.drafted // BLOCK_SLOTS
            self.prefix.mark(sequence.namespace, sequence.node, state, blocks)

    @staticmethod
    def _swapped(sequence: Sequence, index: int, state: str) -> None:
        """A block was given up for a known one, which may lack the drafter's state."""
        assert sequence.node is not None
        if sequence.node.drafter != state:
            sequence.drafted = min(sequence.drafted, index * BLOCK_SLOTS)

    def fork(self, first: Sequence, others: Iterable[Sequence]) -> None:
        """Let other choices of a request start from its prompt: full blocks are shared, the last one copied.

        Each computes the prompt's last token again, in a block of its own, to draw from. Where there is no block
        to copy into, it waits for its turn like anybody else.
        """
        full, rest = divmod(first.prompt_length - 1, BLOCK_SLOTS)
        pairs = []
        if self.drafter is not None:
            self.drafter.settle(first)
        for sequence in others:
            sequence.waits_for = None
            if self.pool.available < full + 1 or len(first.blocks) <= full:
                continue
            self.pool.share(first.blocks[:full])
            sequence.blocks, sequence.computed = first.blocks[:full], full * BLOCK_SLOTS
            sequence.drafted = min(first.drafted, sequence.computed)
            sequence.node = first.node if first.node is not None and first.node.depth == full else None
            if self.prefix is not None and not sequence.alone and sequence.node is None and full:
                sequence.node = self.prefix.find(sequence.namespace, sequence.tokens, full)
            if rest and self.pool.available:
                sequence.blocks.extend(self.pool.take(1))
                pairs.append((first.blocks[full], sequence.blocks[full]))
                sequence.computed += rest
                sequence.drafted = min(first.drafted, sequence.computed + 1)  # the block has a slot more
        self._copy(pairs)

    def move(self, slots: SequenceOf[tuple[int, int]]) -> None:
        """Copy single slots, (from, to) in order: the accepted branch of a tree goes where a chain would be."""
        if slots:
            self._executable.copy_slots(np.array(slots, np.int32))

    def follow(self, drafter: Drafter | None, sequences: Iterable[Sequence]) -> None:
        """Another drafter's state is kept from now on; it has none of any sequence yet."""
        self.drafter = drafter
        for sequence in sequences:
            sequence.drafted = 0

    def roll_out(self, executable: Executable, drafter: Drafter | None) -> None:
        """Go on with the same blocks under a sibling of the executable, and a drafter that the last one is part of."""
        self._executable.copy_blocks(np.empty((0, 2), np.int32))  # copies that wait for its next step are made now
        self._executable, self.drafter = executable, drafter

    def check(self, sequences: Iterable[Sequence], borrowed: Iterable[list[int]] = ()) -> None:
        """Raise ValueError if blocks were leaked or are wrongly shared; some are `borrowed` by others."""
        held = list(sequences)
        self.pool.check([*(s.blocks for s in held), *borrowed], self.prefix.blocks() if self.prefix else ())
        self.spare.check([s.saved for s in held])

    def _copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        if copies := list(pairs):
            array = np.array(copies, np.int32)
            self._executable.copy_blocks(array)
            if self.drafter is not None:
                self.drafter.copy_blocks(array)


def block_price(cost: CostModel, kv_bytes: int) -> Callable[[int], float]:
    """Seconds of computing the block at a depth (from 1) again, as part of a prompt."""

    @cache
    def seconds(depth: int) -> float:
        start = (depth - 1) * BLOCK_SLOTS
        context = BLOCK_SLOTS * start + BLOCK_SLOTS * (BLOCK_SLOTS + 1) // 2
        return cost.seconds(StepShape(BLOCK_SLOTS, 0, (start + BLOCK_SLOTS) * kv_bytes, context))

    return seconds
