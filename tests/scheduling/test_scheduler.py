"""The scheduler: the promises that every plan keeps, one by one."""

from __future__ import annotations

from dataclasses import replace

from slipstream.kvcache import BlockPool, PrefixCache
from slipstream.program import BLOCK_SLOTS, KVFormat, Namespace, StepShape
from slipstream.program.sampling import SamplingParams
from slipstream.roofline.cost import CostModel, Curve
from slipstream.scheduling import Limits, Plan, Sequence, State, schedule
from slipstream.scheduling.scheduler import ALONE, BEARABLE, LEAST_CHUNK, MOST_STRETCH, STRETCH
from tests.scheduling.promises import Budgets

# 10 ms for a step, 1 ms a row past 8, 2 ms for the head.
COST = CostModel(Curve((1, 8, 512), (10e-3, 10e-3, 514e-3)), Curve((1, 64), (2e-3, 4e-3)), (0.0, 0.0, 1e-8, 0.0))
PARAMS = SamplingParams()
NAMESPACE = Namespace("", "", KVFormat.BF16)


def sequence(number: int, prompt: int, **more: object) -> Sequence:
    limit = more.pop("limit", 1 << 30)
    return Sequence(number, 0, [1] * prompt, prompt, PARAMS, 0, frozenset(), limit, NAMESPACE, **more)  # type: ignore[arg-type]


def running(number: int, prompt: int, pool: BlockPool, computed: int | None = None, **more: object) -> Sequence:
    """A sequence that holds its blocks; by default all but its last token is computed."""
    s = sequence(number, prompt, **more)
    s.computed = prompt - 1 if computed is None else computed
    s.blocks = pool.take(-(-max(s.computed, 1) // BLOCK_SLOTS))
    return s


def plan_of(sequences: list[Sequence], pool: BlockPool, now: float = 0.0, **more: object) -> Plan:
    limits = more.pop("limits", Limits(512))
    return schedule(State(now, sequences, pool, limits, **more))  # type: ignore[arg-type]


def rows_of(plan: Plan) -> dict[int, int]:
    return {span.sequence.request: span.rows for span in plan.spans}


def test_decodes_come_first_and_prompts_fill_up() -> None:
    pool = BlockPool(100)
    prompt, decodes = sequence(0, 300), [running(i, 40, pool) for i in (1, 2)]
    plan = plan_of([prompt, *decodes], pool, limits=Limits(100))
    assert [span.sequence.request for span in plan.spans] == [1, 2, 0]
    assert rows_of(plan) == {1: 1, 2: 1, 0: 98}


def test_prompts_are_priced() -> None:
    pool = BlockPool(1000)
    decodes, prompt = [running(i, 40, pool) for i in range(4)], sequence(9, 4000)
    plan = plan_of([*decodes, prompt], pool, cost=COST, kv_bytes=100)
    seconds = COST.seconds
    bare, rows = seconds(shape := shape_of(plan, without=9)), rows_of(plan)[9]
    assert shape.rows == 4
    assert seconds(shape_of(plan)) <= (1 + STRETCH) * bare
    assert LEAST_CHUNK <= rows < 20, "about what half of a step is worth, at 1 ms a row"
    crowd = plan_of([*decodes, prompt, *(sequence(i, 4000) for i in range(20, 26))], pool, cost=COST)
    assert rows_of(crowd)[9] > 3 * rows, "seven who wait count for more than one"
    masses = plan_of([*decodes, prompt, *(sequence(i, 4000) for i in range(20, 99))], pool, cost=COST)
    assert STRETCH * 80 * bare > BEARABLE > MOST_STRETCH * bare
    assert seconds(shape_of(masses)) <= BEARABLE, "nobody who reads waits longer, however many come"
    wide = plan_of([*decodes, prompt], pool, cost=COST, limits=Limits(512, tpot_target=0.1))
    assert rows_of(wide)[9] > 4 * rows
    alone = plan_of([prompt], pool, cost=COST)
    assert rows < rows_of(alone)[9] < 512
    assert seconds(shape_of(alone)) <= ALONE


def test_many_short_prompts_keep_to_it_as_one_long_one() -> None:
    """Of each the cache knows all but the last token: the rows that go in any case go once, not for each of them."""
    pool = BlockPool(1000)
    decodes, prompts = [running(i, 40, pool) for i in range(4)], [sequence(i, 65) for i in range(10, 99)]
    for limits in (Limits(512), Limits(512, ttft_target=9.0)):
        state = State(0.0, [*decodes, *prompts], pool, limits, cost=COST, peek=lambda s: 64)
        Budgets(state, schedule(state)).keep()
    tight = State(0.0, [*decodes, *prompts], pool, Limits(512), cost=replace(COST, host=1.0), peek=lambda s: 64)
    assert len(schedule(tight).spans) > 4 + LEAST_CHUNK, "where a step costs a lot, many ride along"


def test_a_target_between_tokens_keeps_newcomers_waiting() -> None:
    """Rather one more in the queue than everybody's tokens too late; alone anybody may run."""
    pool = BlockPool(1000)
    newcomer = sequence(99, 40)

    def admitted(decodes: int, target: float | None) -> bool:
        those = [running(i, 40, pool) for i in range(decodes)]
        return 99 in rows_of(plan_of([*those, newcomer], pool, cost=COST, limits=Limits(512, tpot_target=target)))

    alone, nine = COST.seconds(StepShape(1, 1, 0, 40)), COST.seconds(StepShape(9, 9, 0, 9 * 40))
    assert admitted(8, None)
    assert admitted(8, nine * 1.01)
    assert not admitted(8, nine * 0.99)
    assert admitted(0, alone * 0.5)


def test_a_target_to_the_first_token_gives_late_prompts_more() -> None:
    """Who has waited for half of the target makes the step longer, up to twice one without prompts; others do not."""
    pool = BlockPool(1000)
    decodes = [running(i, 40, pool) for i in range(4)]
    bare = COST.seconds(StepShape(4, 4, 0, 4 * 40))

    def stretch(now: float, ttft: float | None, prompt: Sequence | None = None) -> tuple[int, float]:
        limits = Limits(512, ttft_target=ttft)
        plan = plan_of([*decodes, prompt or sequence(9, 4000)], pool, now, cost=COST, limits=limits)
        return rows_of(plan)[9], COST.seconds(shape_of(plan)) / bare

    plain, stretched = stretch(now=1.1, ttft=None)
    late, doubled = stretch(now=1.1, ttft=2.0)
    assert stretched <= 1 + STRETCH < doubled <= 2.0
    assert late > plain
    assert stretch(now=0.9, ttft=2.0)[0] == plain, "there is time yet"
    again = running(9, 4000, pool, computed=1000)
    again.prompt_length -= 1  # it gave way after its first token
    assert stretch(now=1.1, ttft=2.0, prompt=again) == stretch(now=1.1, ttft=None, prompt=again)
    tight = Limits(512, tpot_target=1.1 * bare, ttft_target=2.0)
    plan = plan_of([*decodes, sequence(9, 4000)], pool, 1.1, cost=COST, limits=tight)
    assert rows_of(plan)[9] == late, "the target between tokens gives way to it"


def shape_of(plan: Plan, without: int = -1):
    from slipstream.program import CacheSpec, SpanShape

    spans = [s for s in plan.spans if s.sequence.request != without]
    shapes = [
        SpanShape(s.sequence.computed, s.rows, int(s.sequence.computed + s.rows == len(s.sequence.tokens)))
        for s in spans
    ]
    context = sum((2 * c.start + c.rows + 1) * c.rows // 2 for c in shapes)
    return StepShape(sum(c.rows for c in shapes), StepShape.of_spans(shapes, CacheSpec(())).logit_rows, 0, context)


def test_priority_then_fairness_then_arrival() -> None:
    pool = BlockPool(1000)
    first = sequence(0, 40, tenant="greedy", arrived=0.0)
    second = sequence(1, 40, tenant="modest", arrived=1.0)
    urgent = sequence(2, 40, tenant="greedy", arrived=2.0, priority=-1)
    plan = plan_of([first, second, urgent], pool, now=3.0, served={"greedy": 500.0, "modest": 1.0})
    assert [span.sequence.request for span in plan.spans] == [2, 1, 0]
    aged = plan_of([sequence(0, 40, priority=3), sequence(1, 40, arrived=99.0)], pool, now=100.0)
    assert [span.sequence.request for span in aged.spans] == [0, 1], "waiting raises priority"


def test_a_long_queue_does_not_grow_urgent() -> None:
    """However long a tenant's requests have waited, another tenant that has had less goes first."""
    pool = BlockPool(100)
    queue = [sequence(i, 40, tenant="greedy", arrived=float(i)) for i in range(5)]
    modest = sequence(9, 40, tenant="modest", arrived=600.0)
    plan = plan_of([*queue, modest], pool, now=601.0, served={"greedy": 900.0, "modest": 10.0})
    assert [span.sequence.request for span in plan.spans] == [9, 0, 1, 2, 3, 4]
    late = sequence(7, 40, tenant="greedy", arrived=0.0, priority=9)
    plan = plan_of([late, modest], pool, now=601.0, served={"greedy": 1.0, "modest": 10.0})
    assert [span.sequence.request for span in plan.spans] == [7, 9], "lifted, it is served as the others are"


def test_admission_needs_room_for_all_of_a_prompt() -> None:
    pool = BlockPool(10)
    decode = running(0, 40, pool)
    plan = plan_of([decode, sequence(1, 300)], pool)
    assert rows_of(plan) == {0: 1}
    assert rows_of(plan_of([decode, sequence(1, 200)], pool)) == {0: 1, 1: 200}
    few = plan_of([decode, sequence(1, 32)], pool, limits=Limits(512, max_sequences=1))
    assert rows_of(few) == {0: 1}


def test_what_can_never_fit_and_what_is_late() -> None:
    pool = BlockPool(4)
    plan = plan_of([sequence(0, 200), sequence(1, 20, deadline=5.0), sequence(2, 20)], pool, now=6.0)
    assert [s.request for s in plan.too_large] == [0]
    assert [s.request for s in plan.expired] == [1]
    assert rows_of(plan) == {2: 20}


def test_the_least_urgent_gives_way() -> None:
    pool = BlockPool(4)
    old, young = running(0, 65, pool, arrived=0.0), running(1, 65, pool, arrived=1.0)
    assert pool.available == 0
    plan = plan_of([old, young], pool, now=2.0)
    assert [s.request for s in plan.preempted] == [1]
    assert rows_of(plan) == {0: 1}


def test_moving_out_of_the_cache_when_it_is_cheaper() -> None:
    pool = BlockPool(4)
    old, young = running(0, 65, pool, arrived=0.0), running(1, 65, pool, arrived=1.0)
    assert pool.available == 0

    def saved(cost: CostModel | None, spare: int) -> list[int]:
        plan = plan_of([old, young], pool, now=2.0, cost=cost, kv_bytes=1000, spare=spare)
        assert [s.request for s in plan.preempted] == [1]
        return [s.request for s in plan.saved]

    again = COST.seconds(StepShape(64, 0, 64_000, 64 * 65 // 2))
    moved = 2 * 2 * BLOCK_SLOTS * 1000
    assert saved(replace(COST, copy=0.9 * again / moved), 2) == [1]
    assert saved(replace(COST, copy=1.1 * again / moved), 2) == []
    assert saved(replace(COST, copy=0.0), 1) == [], "there is no room for its two blocks"
    assert saved(None, 2) == []
    back = sequence(3, 40, computed=39, saved=[0, 1])
    assert rows_of(plan_of([back], BlockPool(4), peek=lambda s: 0)) == {3: 1}, "what was saved need not be computed"
    assert rows_of(plan_of([back], BlockPool(1))) == {}, "it needs its blocks back"


def test_what_others_hold_as_well_is_not_computed_again() -> None:
    pool = BlockPool(3)
    prefix = PrefixCache(pool)
    old, young = running(0, 65, pool, arrived=0.0), sequence(1, 65, computed=64, arrived=1.0)
    beginning, _ = prefix.extend(NAMESPACE, None, (1,) * BLOCK_SLOTS, old.blocks[0])
    pool.share(old.blocks[:1])
    young.blocks = [old.blocks[0], *pool.take(1)]

    def saved(seconds: float) -> bool:
        cost = replace(COST, copy=seconds / (2 * 2 * BLOCK_SLOTS * 1000))
        plan = plan_of([old, young], pool, now=2.0, cost=cost, kv_bytes=1000, spare=2)
        assert plan.preempted == [young]
        return plan.saved == [young]

    pairs = 64 * 65 // 2
    everything = COST.seconds(StepShape(64, 0, 64_000, pairs))
    rest = COST.seconds(StepShape(32, 0, 64_000, pairs - 32 * 33 // 2))
    assert saved(0.99 * everything), "the prefix cache does not know it"
    young.node = old.node = beginning
    assert not saved(0.99 * everything)
    assert not saved(1.01 * rest)
    assert saved(0.99 * rest)


def test_tokens_that_are_not_known_yet() -> None:
    pool = BlockPool(4)
    going, ending = running(0, 40, pool), running(1, 31, pool, limit=32)
    for s in (going, ending):
        s.computed, s.unknown = len(s.tokens), 1
    assert rows_of(plan_of([going, ending], pool)) == {0: 1}, "one ends with the token that is under way"
    cramped = BlockPool(2)
    full, other = running(2, 32, cramped), running(3, 3, cramped, limit=4)
    for s in (full, other):
        s.computed, s.unknown = len(s.tokens), 1
    plan = plan_of([full, other], cramped)
    assert (plan.spans, plan.preempted) == ([], []), "blocks that are about to be given back are waited for"


def test_cached_prefixes_are_counted() -> None:
    pool = BlockPool(100)
    plan = plan_of([sequence(0, 1000)], pool, limits=Limits(2000), peek=lambda s: 960)
    assert rows_of(plan) == {0: 40}
