"""TappedDrafter: what drafters share that read the target's hidden states (EAGLE-3, DSpark).

Hidden states come with the steps that compute them and wait here until the drafter takes them in. What the drafter
keeps at a position depends on the tokens up to that position only, so that its state can be shared, copied and moved
with the target's blocks. Where that needs the hidden state of the position before (EAGLE-3), the last one of every full
block is kept besides, so that an answer whose beginning came from the prefix cache can go on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from slipstream.kernels import Executable
from slipstream.kernels.native import NativeExecutable
from slipstream.program import BLOCK_SLOTS
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.drafter import Computed, Drafter

Float32Array = npt.NDArray[np.float32]
MOST_WAITING = 64
"""Hidden states of an answer that wait; then they are taken in, whether anybody wants a draft or not."""


@dataclass
class Waiting:
    """Hidden states of consecutive positions from `start` that the drafter has not taken in."""

    start: int
    pieces: list[Float32Array] = field(default_factory=list)
    count: int = 0
    last: Float32Array | None = None
    """The one that was taken last."""

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + self.count

    def add(self, taps: Float32Array) -> None:
        """More of them."""
        self.pieces.append(taps)
        self.count += len(taps)

    def take(self, count: int) -> Float32Array:
        """The first `count`, which wait no longer."""
        whole = self.pieces[0] if len(self.pieces) == 1 else np.concatenate(self.pieces)
        self.pieces = [whole[count:]] if count < len(whole) else []
        self.start += count
        self.count -= count
        self.last = whole[count - 1 : count].copy()
        return whole[:count]

    def again(self) -> None:
        """Let the one that was taken last wait once more."""
        assert self.last is not None
        self.pieces.insert(0, self.last)
        self.start -= 1
        self.count += 1


class TappedDrafter(Drafter):
    """Keeps hidden states until they are wanted, and knows whose state has a hole and cannot be drafted for."""

    neural = True
    shift = 0
    """1 if the state at a position needs the hidden state of the one before, 0 if its own."""

    def __init__(self, executable: Executable, state: str, tap_width: int, blocks: int):
        """`blocks` are all blocks that may be copied, spare ones included; `tap_width` is that of all taps."""
        self.executable, self.state, self.tap_width = executable, state, tap_width
        self._waiting: dict[int, Waiting] = {}
        self._edges = np.zeros((blocks if self.shift else 0, tap_width), np.float32)

    @abstractmethod
    def _take_in(self, answers: Sequence[Answer]) -> None:
        """Take in what waits, as far as the tokens for it are known, and count it in `drafted`."""

    def ready(self, answer: Answer) -> bool:
        """Whether the answer can be drafted for: nothing before what waits is missing."""
        return id(answer) in self._waiting

    def commit(self, computed: Sequence[Computed]) -> None:
        """Keep the hidden states of what was computed."""
        full = []
        for answer, start, tokens, taps in computed:
            assert taps is not None
            waiting = self._waiting.get(id(answer))
            if waiting is None or waiting.end != start:
                waiting = self._begin(answer, start)
            if waiting is None:
                self._waiting.pop(id(answer), None)
                continue
            self._waiting[id(answer)] = waiting
            waiting.add(taps[:tokens])
            if self.shift:
                for position in range(start + BLOCK_SLOTS - 1 - start % BLOCK_SLOTS, start + tokens, BLOCK_SLOTS):
                    self._edges[answer.blocks[position // BLOCK_SLOTS]] = taps[position - start]
            if waiting.count > MOST_WAITING:
                full.append(answer)
        if full:
            self._take_in(full)

    def _begin(self, answer: Answer, start: int) -> Waiting | None:
        """Where hidden states from `start` on continue what the drafter has; None: there is a hole before them."""
        have = answer.drafted
        if start == 0 or have >= start + self.shift:
            answer.drafted = min(have, start + self.shift) if start else 0
            return Waiting(start)
        if self.shift and have == start and start % BLOCK_SLOTS == 0:
            return Waiting(start - 1, [self._edges[answer.blocks[start // BLOCK_SLOTS - 1]][None].copy()], 1)
        return None

    def settle(self, answer: Answer) -> None:
        """Take in everything that can be, since the answer's blocks are about to be copied."""
        if self.ready(answer):
            self._take_in([answer])

    def free(self, answer: Answer, *, learn: bool = True) -> None:
        """Forget an answer."""
        self._waiting.pop(id(answer), None)

    def irreplaceable(self, answer: Answer) -> str:
        """It needs hidden states, which only come with computing the tokens again."""
        return self.state

    def kept(self, state: str, block: int) -> Sequence[npt.NDArray[np.uint8]]:
        """Its part of the block, and the hidden state at the block's end if it keeps that."""
        if state != self.state or not isinstance(self.executable, NativeExecutable):
            return ()
        cache = self.executable.operands.cache
        edges = [self._edges[block].view(np.uint8)] if self.shift else []
        return [cache.data.reshape(-1, cache.block_bytes)[block], *edges]

    def copy_blocks(self, pairs: npt.NDArray[np.int32]) -> None:
        """Copy the drafter's part of blocks."""
        self.executable.copy_blocks(pairs)
        if self.shift:
            for source, to in pairs:
                self._edges[to] = self._edges[source]
