"""Shelving: cached blocks go to disk while the engine has nothing else to do, and come back when a prompt begins so."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from pathlib import Path

from slipstream.errors import UsageError
from slipstream.kernels import Executable
from slipstream.kernels.native import NativeExecutable
from slipstream.kvcache import BlockPool, PrefixCache, Shelf
from slipstream.program import BLOCK_SLOTS
from slipstream.scheduling import Sequence

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
        self._cache = executable.operands.cache
        self._fresh = prefix.fresh = deque()

    def peek(self, sequence: Sequence, known: int) -> int:
        """Tokens of a sequence's beginning that are known, if the cache knows so many."""
        most, have = (len(sequence.tokens) - 1) // BLOCK_SLOTS, known // BLOCK_SLOTS
        names = self._names(sequence, most)
        while have < most and self.shelf.has(names[have]):
            have += 1
        return have * BLOCK_SLOTS

    def fetch(self, sequence: Sequence) -> None:
        """Read the blocks that follow those which a sequence has from the cache, as far as there is room for them."""
        most = (len(sequence.tokens) - 1) // BLOCK_SLOTS
        names = self._names(sequence, most)
        rows = self._cache.data.reshape(-1, self._cache.block_bytes)
        while len(sequence.blocks) < most and self.shelf.has(name := names[len(sequence.blocks)]):
            if self._pool.available <= LEFT_BLOCKS:
                break
            at = len(sequence.blocks) * BLOCK_SLOTS
            key = tuple(sequence.tokens[at : at + BLOCK_SLOTS])
            (block,) = self._pool.take(1)
            if not self.shelf.read(name, key, rows[block]):
                self._pool.release([block])
                break
            sequence.node, block = self._prefix.extend(sequence.namespace, sequence.node, key, block)
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

    def put_one(self) -> None:
        """Put a block on the shelf. No step may be running: it may still be writing it."""
        namespace, node = self._fresh.popleft()
        if not node.known:
            return
        name = self.shelf.root(namespace)
        for key in node.path():
            name = self.shelf.name(name, key)
        rows = self._cache.data.reshape(-1, self._cache.block_bytes)
        self.shelf.write(name, node.key, rows[node.block])

    def _names(self, sequence: Sequence, count: int) -> SequenceOf[str]:
        """The names of a sequence's first blocks; the sequence keeps them, as they follow from its tokens."""
        names = sequence.names
        while len(names) < count:
            at = len(names) * BLOCK_SLOTS
            before = names[-1] if names else self.shelf.root(sequence.namespace)
            names.append(self.shelf.name(before, sequence.tokens[at : at + BLOCK_SLOTS]))
        return names
