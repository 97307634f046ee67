"""Layer 2: the block pool, the prefix cache, and its shelf on disk."""

from slipstream.kvcache.pool import BlockPool, OutOfBlocksError
from slipstream.kvcache.prefix import Node, PrefixCache
from slipstream.kvcache.shelf import Shelf

__all__ = ["BlockPool", "Node", "OutOfBlocksError", "PrefixCache", "Shelf"]
