"""Layer 2: the block pool; later the prefix cache, offload tiers and transfer."""

from slipstream.kvcache.pool import BlockPool, OutOfBlocksError

__all__ = ["BlockPool", "OutOfBlocksError"]
