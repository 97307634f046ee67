"""The prefix cache against a plain model of it: what is found, what is shared, and what is given up."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kvcache import BlockPool, OutOfBlocksError, PrefixCache
from slipstream.program import BLOCK_SLOTS, KVFormat, Namespace

HERE = Namespace("model", "numerics", KVFormat.BF16)
Tokens = list[int]


def text(*blocks: int, rest: int = 1) -> Tokens:
    """Blocks of equal tokens, and a few more."""
    return [number for number in blocks for _ in range(BLOCK_SLOTS)] + [0] * rest


def learn(cache: PrefixCache, tokens: Tokens, namespace: Namespace = HERE) -> list[int]:
    """What a sequence does: look up, compute the rest, remember it."""
    blocks, node = cache.match(namespace, tokens)
    full = len(tokens) // BLOCK_SLOTS
    blocks += cache.pool.take(-(-len(tokens) // BLOCK_SLOTS) - len(blocks))
    for index in range(node.depth if node else 0, full):
        key = tuple(tokens[index * BLOCK_SLOTS : (index + 1) * BLOCK_SLOTS])
        node, blocks[index] = cache.extend(namespace, node, key, blocks[index])
    return blocks


def test_finds_the_longest_known_beginning() -> None:
    cache = PrefixCache(BlockPool(32))
    first = learn(cache, text(1, 2, 3))
    assert cache.peek(HERE, text(1, 2, 9)) == 2 * BLOCK_SLOTS
    blocks, node = cache.match(HERE, text(1, 2, 9))
    assert blocks == first[:2]
    assert node is not None
    assert node.depth == 2
    assert cache.match(HERE, text(9))[0] == []
    whole = text(1, 2, 3, rest=0)
    assert cache.peek(HERE, whole) == 2 * BLOCK_SLOTS, "the last token has to be computed for its logits"


@pytest.mark.parametrize(
    "change", [{"model": "x"}, {"numerics": "x"}, {"kv_format": KVFormat.INT8}, {"adapter": "x"}, {"salt": "x"}]
)
def test_other_namespaces_see_nothing(change: dict[str, object]) -> None:
    cache = PrefixCache(BlockPool(32))
    learn(cache, text(1, 2))
    assert cache.peek(replace(HERE, **change), text(1, 2)) == 0  # type: ignore[arg-type]
    assert cache.peek(HERE, text(1, 2)) == 2 * BLOCK_SLOTS


def test_two_that_computed_the_same_share_one_block() -> None:
    pool = BlockPool(32)
    cache = PrefixCache(pool)
    ours, theirs = pool.take(1), pool.take(1)
    key = tuple(text(5, rest=0))
    _, kept = cache.extend(HERE, None, key, ours[0])
    node, shared = cache.extend(HERE, None, key, theirs[0])
    assert shared == kept == ours[0]
    pool.check([[kept], [shared]], cache.blocks())
    assert cache.extend(HERE, None, key, kept)[0] is node


def test_gives_up_what_is_cheap_and_seldom_used() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, lambda depth: float(depth))
    for tokens in (text(1, 2, rest=0), text(3, rest=0), text(4, rest=0)):
        pool.release(learn(cache, tokens))
    for _ in range(5):
        pool.release(cache.match(HERE, text(3))[0])
    assert pool.available == 4
    taken = pool.take(1)
    assert cache.peek(HERE, text(4)) == 0, "used once, and shallow"
    assert cache.peek(HERE, text(3)) == BLOCK_SLOTS
    taken += pool.take(1)
    assert cache.peek(HERE, text(1, 2)) == BLOCK_SLOTS, "a leaf goes before what it hangs on"
    with pytest.raises(OutOfBlocksError):
        pool.take(3)
    pool.release(taken)


def test_what_sequences_hold_is_never_given_up() -> None:
    pool = BlockPool(6)
    cache = PrefixCache(pool)
    held = learn(cache, text(1, 2))
    pool.release(learn(cache, text(7, rest=0)))
    taken = pool.take(pool.available)
    assert cache.peek(HERE, text(1, 2)) == 2 * BLOCK_SLOTS
    assert not set(taken) & set(held)
    pool.release(taken)
    pool.release(held)
    cache.clear()
    assert pool.free == 6
    assert len(cache) == 0


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9))
def test_random_use_keeps_the_books(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(6, 20))
    cache = PrefixCache(pool)
    known: dict[int, Tokens] = {}
    held: list[list[int]] = []
    for _ in range(60):
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.randrange(len(held))))
        else:
            tokens = text(*(rng.randint(1, 3) for _ in range(rng.randint(1, 4))), rest=rng.randint(0, 3))
            if -(-len(tokens) // BLOCK_SLOTS) > pool.available:
                continue
            blocks = learn(cache, tokens)
            for index in range(len(tokens) // BLOCK_SLOTS):
                known[blocks[index]] = tokens[: (index + 1) * BLOCK_SLOTS]
            held.append(blocks)
        pool.check(held, cache.blocks())
        found, _ = cache.match(HERE, probe := text(rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 3)))
        for index, block in enumerate(found):
            assert known[block] == probe[: (index + 1) * BLOCK_SLOTS], "a block holds what the tree says it does"
        pool.release(found)
    for blocks in held:
        pool.release(blocks)
    assert pool.available == pool.size
