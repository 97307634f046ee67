"""BlockPool: which cache blocks are free, how many hold each of the others, which the prefix cache could give up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from slipstream.errors import SlipstreamError


class OutOfBlocksError(SlipstreamError):
    """The pool has fewer blocks to give than were asked for."""


class BlockPool:
    """Reference counts of `size` blocks. A block is free when nothing refers to it.

    The prefix cache holds one reference to each block it knows; a block that only the cache holds is *evictable*:
    as good as free, and given up when it is needed.
    """

    def __init__(self, size: int):
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._references = [0] * size
        self._cached = bytearray(size)
        self.evictable = 0
        self.evict: Callable[[int], None] = lambda count: None
        """Called by `take` to make at least `count` more blocks free."""

    @property
    def free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Blocks that can be taken: free ones, and those that only the prefix cache holds."""
        return len(self._free) + self.evictable

    def take(self, count: int) -> list[int]:
        """`count` blocks with one reference each, or OutOfBlocksError and no change."""
        if count > self.available:
            raise OutOfBlocksError(f"{count} blocks are needed, {self.available} of {self.size} are to be had")
        if count > len(self._free):
            self.evict(count - len(self._free))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each block."""
        for block in blocks:
            if not self._references[block]:
                raise ValueError(f"block {block} is free and cannot be shared")
            if self._cached[block] and self._references[block] == 1:
                self.evictable -= 1
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less; blocks with none left become free."""
        for block in blocks:
            if not self._references[block]:
                raise ValueError(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)
            elif self._cached[block] and self._references[block] == 1:
                self.evictable += 1

    def hold_for_cache(self, block: int) -> None:
        """The prefix cache keeps a block that somebody holds."""
        if self._cached[block] or not self._references[block]:
            raise ValueError(f"block {block} is free, or cached already")
        self._cached[block] = 1
        self._references[block] += 1

    def drop_from_cache(self, block: int) -> None:
        """The prefix cache forgets a block; it becomes free if nobody else holds it."""
        if not self._cached[block]:
            raise ValueError(f"block {block} is not cached")
        self._cached[block] = 0
        self._references[block] -= 1
        if not self._references[block]:
            self.evictable -= 1
            self._free.append(block)

    def only_holder(self, block: int) -> bool:
        """Whether just the prefix cache holds a block."""
        return bool(self._cached[block]) and self._references[block] == 1

    def releasable(self, blocks: Sequence[int]) -> int:
        """How many more blocks would be available if one holder of each of `blocks` let go."""
        return sum(self._references[block] - self._cached[block] == 1 for block in blocks)

    def check(self, held: Sequence[Sequence[int]], cached: Iterable[int] = ()) -> None:
        """Raise ValueError unless exactly the block lists `held` and the cache account for all references."""
        counts, known = [0] * self.size, set(cached)
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        evictable = sum(1 for block in known if not counts[block])
        for block in known:
            counts[block] += 1
        free = [block for block, count in enumerate(counts) if not count]
        if counts != self._references or sorted(self._free) != free:
            raise ValueError("the pool's references and the sequences' block tables disagree")
        if evictable != self.evictable or known != {b for b in range(self.size) if self._cached[b]}:
            raise ValueError("the pool's and the prefix cache's accounts of cached blocks disagree")
