"""Planning is a pure look: twice from one state it says the same, and sequences, blocks, cache and disk stay as they
were.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine import Engine, LoadOptions, Model, Terms, load_model
from slipstream.kvcache import Shelf
from slipstream.program import BLOCK_SLOTS
from slipstream.program.sampling import SamplingParams
from slipstream.scheduling import Limits, Plan, State, schedule
from tests.scheduling.test_scheduler import COST


def parts(thing: Any) -> dict[str, Any]:
    """What a thing is made of now, its lists and tables as they are now."""
    containers = (list, dict, deque, Counter, bytearray)
    names = [f.name for f in fields(thing)] if is_dataclass(thing) else [*vars(thing)]
    found = {name: getattr(thing, name) for name in names}
    return {name: value.copy() if isinstance(value, containers) else value for name, value in found.items()}


class Looking:
    """The scheduler, watched. `met` counts what the states had in them."""

    def __init__(self, shelf: Shelf | None):
        self.shelf, self.met = shelf, Counter[str]()
        self.engine: Engine

    def __call__(self, state: State) -> Plan:
        before = self.everything(state)
        plan = schedule(state)
        assert schedule(state) == plan
        assert self.everything(state) == before, "planning changes nothing"
        bare = [s for s in state.sequences if not s.blocks and not s.saved]
        if self.shelf is not None:
            whole = all(len(s.names) == (len(s.tokens) - 1) // BLOCK_SLOTS for s in bare)
            assert whole, "what is looked up was known before, and nothing is missed"
        self.met["found"] += sum(1 for s in bare if state.peek(s))
        self.met["preempted"] += len(plan.preempted)
        self.met["saved"] += len(plan.saved)
        return plan

    def everything(self, state: State) -> list[Any]:
        """All that planning can lay hands on, down to the times of the files."""
        engine, shelf, prefix = self.engine, self.shelf, self.engine.prefix
        tree = prefix and (
            prefix._age,
            replace(prefix.stats),
            list(prefix.fresh or ()),
            [(node.path(), node.block, node.uses, node.rank, node.drafter) for node in prefix._nodes()],
        )
        status = [(path.name, path.stat()) for path in sorted(shelf.folder.iterdir())] if shelf else []
        files = [(name, s.st_size, s.st_mtime_ns, s.st_atime_ns) for name, s in status]
        known = [parts(s) for s in state.sequences], parts(engine.pool), parts(engine.spare), dict(state.served)
        return [*known, tree, shelf and parts(shelf), files]


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Model:
    return replace(load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1)), blocks=14, spare_blocks=12)


def play(model: Model, shelf: Shelf | None, rng: random.Random) -> Counter[str]:
    """Requests that often begin alike, in a cache that holds a few of them; some leave early."""
    looking = Looking(shelf)
    limits = Limits(rng.choice([8, 64]), rng.choice([2, 100]), rng.choice([None, 0.05]), rng.choice([None, 1.0]))
    cost = replace(COST, copy=rng.choice([0.0, 1.0]))
    engine = looking.engine = Engine(model, cost, planner=looking, limits=limits, ahead=False)
    if shelf is not None:
        engine.keep_blocks(shelf)
    beginning = [index % 251 for index in range(4 * BLOCK_SLOTS)]
    waiting, numbers = 10, list[int]()
    while waiting or engine.busy:
        if waiting and rng.random() < 0.3:
            waiting -= 1
            shared = beginning[: rng.choice([0, 40, 70, len(beginning)])]
            prompt = [*shared, *(rng.randrange(256) for _ in range(rng.randint(1, 50)))]
            params = SamplingParams(max_tokens=rng.randint(1, 60), n=rng.choice([1, 1, 3]), ignore_eos=True)
            numbers.append(engine.add(prompt, params, Terms(priority=rng.choice([0, 1]))))
        if numbers and rng.random() < 0.02:
            engine.cancel(rng.choice(numbers))
        if engine.busy:
            engine.step()
        if engine.shelving:
            engine.shelve()
    engine.check()
    looking.met["from the disk"] += engine.prefix.stats.shelf_hits if engine.prefix else 0
    return looking.met


def test_planning_changes_nothing(model: Model) -> None:
    met = sum((play(model, None, random.Random(seed)) for seed in range(6)), Counter[str]())
    assert met.keys() >= {"found", "preempted", "saved"}


def test_planning_changes_nothing_with_blocks_on_disk(model: Model, tmp_path: Path) -> None:
    """The second engine finds what the first one left."""
    met = Counter[str]()
    for seed in range(6):
        size = model.executable.operands.cache.block_bytes  # type: ignore[attr-defined]
        met += play(model, Shelf(tmp_path, 1 << 30, size, "these weights"), random.Random(seed))
    assert met.keys() >= {"found", "preempted", "saved", "from the disk"}
