"""Shelving: cached blocks go to disk while the engine has nothing else to do, and come back when a prompt begins so."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipstream.errors import UsageError
from slipstream.kernels import Executable
from slipstream.kernels.native import NativeExecutable
from slipstream.kvcache import BlockPool, PrefixCache, Shelf
from slipstream.program import BLOCK_SLOTS
from slipstream.scheduling import Sequence
from slipstream.speculation import Drafter

Bytes = npt.NDArray[np.uint8]

MOST_BYTES = 8 << 30
LEFT_BLOCKS = 2
"""Blocks that stay free for what is to be computed when known ones are read."""


def parse_store(text: str) -> tuple[Path, int]:
    """FOLDER[,gb=N]: where cached blocks are kept, and how many bytes of them. Raises UsageError."""
    name, _, rest = text.partition(",")
    key, _, value = rest.partition("=")
    try:
        most = int(1e9 * float(value)) if rest else MOST_BYTES
    except ValueError:
        most = 0
    if not name or most <= 0 or (rest and key != "gb"):
        raise UsageError(f"--prefix-store is FOLDER[,gb=N], not {text!r}")
    return Path(name), most


class Shelving:
    """Moves blocks between the prefix cache of an executable and a shelf."""

    def __init__(self, shelf: Shelf, executable: Executable, pool: BlockPool, prefix: PrefixCache):
        if not isinstance(executable, NativeExecutable):
            raise UsageError("cached blocks are kept by the native backend only")
        self.shelf, self._pool, self._prefix = shelf, pool, prefix
        self._executable, self._cache = executable, executable.operands.cache
        self._fresh = prefix.fresh = deque()

    def peek(self, sequence: Sequence, known: int) -> int:
        """Tokens of a sequence's beginning that are known, if the cache knows so many; changes nothing."""
        have = known // BLOCK_SLOTS
        while have < len(sequence.names) and self.shelf.has(sequence.names[have]):
            have += 1
        return have * BLOCK_SLOTS

    def name(self, sequence: Sequence, drafter: Drafter | None) -> None:
        """Note what the shelf calls the full blocks that a sequence may find, so that `peek` need only look."""
        names, most = sequence.names, (len(sequence.tokens) - 1) // BLOCK_SLOTS
        if not names and sequence.waits_for is not None:
            names.extend(sequence.waits_for.names)
        while len(names) < most:
            at = len(names) * BLOCK_SLOTS
            before = names[-1] if names else self._root(sequence, drafter)
            names.append(self.shelf.name(before, sequence.tokens[at : at + BLOCK_SLOTS]))

    def fetch(self, sequence: Sequence, drafter: Drafter | None) -> None:
        """Read the blocks that follow those which a sequence has from the cache, as far as there is room for them.

        Their files hold the state of its drafter too, if that one cannot make it anew: with a hole there it would never
        draft for the sequence.
        """
        names, beside = sequence.names, drafter.irreplaceable(sequence) if drafter is not None else ""
        if names and names[0] != self.shelf.name(self._root(sequence, drafter), sequence.tokens[:BLOCK_SLOTS]):
            names.clear()  # drafters have been exchanged since
            self.name(sequence, drafter)
        while len(sequence.blocks) < len(names) and self.shelf.has(name := names[len(sequence.blocks)]):
            if self._pool.available <= LEFT_BLOCKS:
                break
            at = len(sequence.blocks) * BLOCK_SLOTS
            key = tuple(sequence.tokens[at : at + BLOCK_SLOTS])
            self._executable.wait()  # a step under way, or a copy after it, may still use the block
            (block,) = self._pool.take(1)
            if not self._read(name, key, self._parts(beside, block, drafter)):
                self._pool.release([block])
                break
            sequence.node, block = self._prefix.extend(sequence.namespace, sequence.node, key, block)
            if beside:
                sequence.node.drafter = beside
            sequence.blocks.append(block)
            if self._fresh and self._fresh[-1][1] is sequence.node:
                self._fresh.pop()  # it is on the shelf
            self._prefix.stats.hits += BLOCK_SLOTS
            self._prefix.stats.shelf_hits += BLOCK_SLOTS
        sequence.computed = len(sequence.blocks) * BLOCK_SLOTS

    @property
    def waiting(self) -> bool:
        """Whether there are blocks that could be put on the shelf."""
        return bool(self._fresh) and self.shelf.stopped is None

    def put_one(self, drafter: Drafter | None) -> None:
        """Put a block on the shelf, with its drafter's state. No step may be running: it may still be writing it."""
        namespace, node = self._fresh.popleft()
        parts = self._parts(node.drafter, node.block, drafter)
        if not node.known or (len(parts) == 1 and drafter is not None and drafter.needs.taps):
            return  # the drafter may still come to it
        name = self.shelf.root(namespace, node.drafter if len(parts) > 1 else "")
        for key in node.path():
            name = self.shelf.name(name, key)
        self.shelf.write(name, node.key, np.concatenate(parts))

    def _root(self, sequence: Sequence, drafter: Drafter | None) -> str:
        return self.shelf.root(sequence.namespace, drafter.irreplaceable(sequence) if drafter is not None else "")

    def _parts(self, state: str, block: int, drafter: Drafter | None) -> list[Bytes]:
        """The bytes of a block: the cache's, and those of a drafter's state."""
        rows = self._cache.data.reshape(-1, self._cache.block_bytes)
        return [rows[block], *(drafter.kept(state, block) if drafter is not None and state else ())]

    def _read(self, name: str, key: SequenceOf[int], parts: SequenceOf[Bytes]) -> bool:
        """Read a block into its parts, if it is whole and holds these tokens."""
        whole = np.empty(sum(part.size for part in parts), np.uint8)
        if not self.shelf.read(name, key, whole):
            return False
        for part, data in zip(parts, np.split(whole, np.cumsum([part.size for part in parts])), strict=False):
            part[:] = data
        return True
