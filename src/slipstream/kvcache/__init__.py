"""Layer 2: the block pool and the prefix cache."""

from slipstream.kvcache.pool import BlockPool, OutOfBlocksError
from slipstream.kvcache.prefix import Node, PrefixCache

__all__ = ["BlockPool", "Node", "OutOfBlocksError", "PrefixCache"]
