"""Which rows the next step computes: decodes first, then prompts in order of arrival, as rows allow."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from slipstream.kvcache import BlockPool
from slipstream.program import BLOCK_SLOTS
from slipstream.scheduling.sequence import Sequence


class SpanPlan(NamedTuple):
    """`rows` tokens of a sequence, from its first one that is not computed."""

    sequence: Sequence
    rows: int


class Plan(NamedTuple):
    """A step's spans, the sequences that lost their blocks for it, and those that can never fit."""

    spans: list[SpanPlan]
    preempted: list[Sequence]
    too_large: list[Sequence]


def blocks_needed(sequence: Sequence, tokens: int) -> int:
    """Blocks the sequence lacks for its first `tokens` tokens."""
    return max(0, -(-tokens // BLOCK_SLOTS) - len(sequence.blocks))


def schedule(sequences: SequenceOf[Sequence], pool: BlockPool, max_rows: int) -> Plan:
    """Plan a step and take the blocks it needs.

    `sequences` are in order of arrival. A sequence that cannot get blocks waits; if nothing at all
    could run, the latest arrival that holds blocks gives them back and is computed again later.
    """
    plan = Plan([], [], [])
    ready = [s for s in sequences if s.waits_for is None and s.missing]
    ready.sort(key=lambda s: s.missing > 1)  # stable: decodes first
    left = max_rows
    for sequence in ready:
        if not left or sequence in plan.preempted:
            break
        rows = min(sequence.missing, left)
        if not _make_room(sequence, rows, sequences, pool, plan):
            continue
        plan.spans.append(SpanPlan(sequence, rows))
        left -= rows
    return plan


def _make_room(sequence: Sequence, rows: int, sequences: SequenceOf[Sequence], pool: BlockPool, plan: Plan) -> bool:
    needed = blocks_needed(sequence, sequence.computed + rows)
    if -(-(sequence.computed + rows) // BLOCK_SLOTS) > pool.size:
        plan.too_large.append(sequence)
        return False
    if not needed:
        return True
    planned = {id(span.sequence) for span in plan.spans}
    victims = [s for s in reversed(sequences) if s.blocks and s is not sequence and id(s) not in planned]
    older = sequences.index(sequence)
    while pool.free < needed and victims:
        victim = victims.pop(0)
        if sequences.index(victim) < older:
            return False
        preempt(victim, pool)
        plan.preempted.append(victim)
    if pool.free < needed:
        return False
    sequence.blocks.extend(pool.take(needed))
    return True


def preempt(sequence: Sequence, pool: BlockPool) -> None:
    """Take a sequence's blocks away; all its tokens have to be computed again."""
    pool.release(sequence.blocks)
    sequence.blocks, sequence.computed = [], 0
