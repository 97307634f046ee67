"""BlockPool: which cache blocks are free, and how many sequences share each of the others."""

from __future__ import annotations

from slipstream.errors import SlipstreamError


class OutOfBlocksError(SlipstreamError):
    """The pool has fewer free blocks than were asked for."""


class BlockPool:
    """Reference counts of `size` blocks. A block is free when nothing refers to it."""

    def __init__(self, size: int):
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._references = [0] * size

    @property
    def free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` blocks with one reference each, or OutOfBlocksError and no change."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks are needed, {len(self._free)} of {self.size} are free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more reference to each block."""
        for block in blocks:
            if not self._references[block]:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One reference less; blocks with none left become free."""
        for block in blocks:
            if not self._references[block]:
                raise ValueError(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)

    def check(self, held: list[list[int]]) -> None:
        """Raise ValueError unless exactly the block lists `held` account for all references."""
        counts = [0] * self.size
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        if counts != self._references or sorted(self._free) != [
            block for block, count in enumerate(counts) if not count
        ]:
            raise ValueError("the pool's references and the sequences' block tables disagree")
