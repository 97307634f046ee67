"""PrefixCache: a radix tree over full blocks; a prompt whose beginning was computed before need not compute it again.

A node is one block and is found by the very tokens it holds, so that no two prefixes can be taken for one another.
There is a tree per namespace: other models, numerics, formats, adapters, keys or salts never see its blocks, nor by
their speed that they exist. What is given up first is chosen by GreedyDual-Size-Frequency (Cherkasova 1998): seconds to
compute the block again × uses, plus an age that grows with every eviction.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from slipstream.kvcache.pool import BlockPool
from slipstream.program import BLOCK_SLOTS, Namespace

BATCH = 64
"""1/BATCH of the pool's blocks is given up at once: looking for leaves costs more than dropping one."""


class Node:
    """A cached block and what may follow it. `drafter` names the drafter whose state the block holds as well."""

    __slots__ = ("block", "children", "depth", "drafter", "key", "parent", "rank", "uses")

    def __init__(self, parent: Node | None, key: tuple[int, ...], block: int, depth: int):
        self.parent, self.key, self.block, self.depth = parent, key, block, depth
        self.children: dict[tuple[int, ...], Node] = {}
        self.uses, self.rank = 0, 0.0
        self.drafter = ""

    @property
    def known(self) -> bool:
        """Whether it is still in the tree."""
        return self.parent is not None and self.parent.children.get(self.key) is self

    def path(self) -> list[tuple[int, ...]]:
        """The tokens of all blocks from the start to this one."""
        keys, node = [], self
        while node.parent is not None:
            keys.append(node.key)
            node = node.parent
        return keys[::-1]

    def drafted(self, drafter: str) -> int:
        """Blocks from the start to this one, without a gap, that hold a drafter's state."""
        count, node = self.depth, self
        while node.parent is not None:
            if node.drafter != drafter:
                count = node.depth - 1
            node = node.parent
        return count

    def mark(self, drafter: str, blocks: int) -> list[Node]:
        """The first `blocks` blocks up to this one hold a drafter's state; returns those that did not before."""
        node, marked = self, list[Node]()
        while node.parent is not None and not (node.depth <= blocks and node.drafter == drafter):
            if node.depth <= blocks:
                node.drafter = drafter
                marked.append(node)
            node = node.parent
        return marked


@dataclass
class CacheStats:
    """Tokens asked for and found, those of them that came from the shelf, blocks given up, since the start."""

    queries: int = 0
    hits: int = 0
    shelf_hits: int = 0
    evicted_blocks: int = 0


class PrefixCache:
    """The cached blocks of a pool, by what they hold."""

    def __init__(self, pool: BlockPool, block_seconds: Callable[[int], float] | None = None):
        """`block_seconds` prices computing the block at a depth (in blocks) again; without it all cost the same."""
        self.pool = pool
        self.stats = CacheStats()
        self.block_seconds = block_seconds or (lambda depth: 1.0)
        self.fresh: deque[tuple[Namespace, Node]] | None = None
        """Blocks that came lately, or their drafter's state, for whoever puts them on a shelf; None: nobody does."""
        self._roots: dict[Namespace, Node] = {}
        self._age = 0.0
        pool.evict = self.evict

    def __len__(self) -> int:
        return sum(1 for _ in self._nodes())

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> tuple[list[int], Node | None]:
        """The longest known prefix of `tokens` that leaves at least the last one to be computed.

        Its blocks are shared: the caller releases them. The node is where the sequence goes on (see `extend`).
        """
        node = self._roots.get(namespace)
        blocks: list[int] = []
        most = (len(tokens) - 1) // BLOCK_SLOTS
        self.stats.queries += len(tokens)
        while node is not None and len(blocks) < most:
            at = len(blocks) * BLOCK_SLOTS
            child = node.children.get(tuple(tokens[at : at + BLOCK_SLOTS]))
            if child is None:
                break
            self._touch(child)
            blocks.append(child.block)
            node = child
        self.pool.share(blocks)
        self.stats.hits += len(blocks) * BLOCK_SLOTS
        return blocks, node if blocks else None

    def peek(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """How many tokens `match` would find; changes nothing."""
        node = self._roots.get(namespace)
        found, most = 0, (len(tokens) - 1) // BLOCK_SLOTS * BLOCK_SLOTS
        while node is not None and found < most:
            node = node.children.get(tuple(tokens[found : found + BLOCK_SLOTS]))
            found += BLOCK_SLOTS if node is not None else 0
        return found

    def find(self, namespace: Namespace, tokens: Sequence[int], depth: int) -> Node | None:
        """The node `depth` blocks into `tokens`, if it is known; changes nothing."""
        node = self._roots.get(namespace)
        for index in range(depth):
            if node is None:
                return None
            node = node.children.get(tuple(tokens[index * BLOCK_SLOTS : (index + 1) * BLOCK_SLOTS]))
        return node

    def extend(self, namespace: Namespace, node: Node | None, key: tuple[int, ...], block: int) -> tuple[Node, int]:
        """Put a full block after `node` (None: at the start). Returns its node and the block to use from now on.

        If another sequence was there first, its block holds the same bits: the caller's is released and that one
        shared in its place.
        """
        if node is None:
            node = self._roots.get(namespace)
            if node is None:
                node = self._roots[namespace] = Node(None, (), -1, 0)
        child = node.children.get(key)
        if child is not None:
            self._touch(child)
            if child.block != block:
                self.pool.share([child.block])
                self.pool.release([block])
            return child, child.block
        child = node.children[key] = Node(node, key, block, node.depth + 1)
        if self.fresh is not None:
            self.fresh.append((namespace, child))
        self.pool.hold_for_cache(block)
        self._touch(child)
        return child, block

    def mark(self, namespace: Namespace, node: Node, drafter: str, blocks: int) -> None:
        """The first `blocks` blocks up to a node hold a drafter's state."""
        marked = node.mark(drafter, blocks)
        if self.fresh is not None and drafter:
            self.fresh.extend((namespace, node) for node in reversed(marked))

    def evict(self, count: int) -> None:
        """Give up at least `count` blocks that only the cache holds, leaves first, the cheapest first."""
        count = max(count, self.pool.size // BATCH)
        nodes = enumerate(self._nodes())
        leaves = [(n.rank, i, n) for i, n in nodes if not n.children and self.pool.only_holder(n.block)]
        heapq.heapify(leaves)
        order = len(leaves) + self.pool.size
        while leaves and count > 0:
            rank, _, node = heapq.heappop(leaves)
            self._age = max(self._age, rank)
            self._remove(node)
            count -= 1
            parent = node.parent
            if parent is not None and parent.parent is not None and not parent.children:
                order += 1
                if self.pool.only_holder(parent.block):
                    heapq.heappush(leaves, (parent.rank, order, parent))

    def clear(self) -> None:
        """Give up all blocks that no sequence holds."""
        while self.pool.evictable:
            self.evict(self.pool.evictable)

    def blocks(self) -> list[int]:
        """All cached blocks."""
        return [node.block for node in self._nodes()]

    def _touch(self, node: Node) -> None:
        node.uses += 1
        node.rank = self._age + node.uses * self.block_seconds(node.depth)

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        self.pool.drop_from_cache(node.block)
        self.stats.evicted_blocks += 1
        if node.parent.parent is None and not node.parent.children:
            self._roots = {name: root for name, root in self._roots.items() if root is not node.parent}

    def _nodes(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
