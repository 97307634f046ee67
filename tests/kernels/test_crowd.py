"""Threads beside other processes: fewer while cores are busy, the same bits whatever their number, nobody stuck."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from slipstream.engine import Engine, LoadOptions, load_model
from slipstream.engine.explain import native_executable
from slipstream.kernels.native import _native
from slipstream.program.sampling import SamplingParams
from tests.engine.test_jitter import collect

STEP = 0.01


class Machine:
    """Steps on a machine of which other processes take `busy` cores; a thread too many loses half of its time."""

    def __init__(self, cores: int):
        self.cores, self.crowd, self.now = cores, _native.Crowd(cores), 0.0

    def run(self, seconds: float, busy: int) -> list[int]:
        """Threads of each step."""
        used, end = [], self.now + seconds
        while self.now < end:
            used.append(self.crowd.threads)
            self.crowd.note(STEP, 0.5 * STEP if self.crowd.threads > max(self.cores - busy, 1) else 0.0, self.now)
            self.now += STEP
        return used


def test_fewer_threads_while_others_keep_cores_busy() -> None:
    machine = Machine(4)
    assert set(machine.run(2.0, 0)) == {4}
    machine.run(2.0, 2)
    crowded = machine.run(60.0, 2)
    assert sum(threads == 2 for threads in crowded) > 0.9 * len(crowded), "it tries more ever more seldom"
    assert max(crowded) == 3
    machine.run(20.0, 0)
    assert set(machine.run(2.0, 0)) == {4}, "and finds out that they are free again"
    assert set(Machine(1).run(5.0, 1)) == {1}


def test_a_blip_is_soon_forgotten() -> None:
    machine = Machine(2)
    machine.run(1.0, 0)
    machine.run(0.1, 1)
    used = machine.run(1.0, 0)
    assert sum(threads == 1 for threads in used) <= 0.25 * len(used)


def test_answers_do_not_depend_on_it(tiny_gguf: Path) -> None:
    """Threads come and go between steps, while others that are not wanted wait."""
    model = load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=4))
    params = SamplingParams(temperature=0.8, max_tokens=200, ignore_eos=True, seed=3, logprobs=1)
    prompt = list(range(30))

    def answer(change: bool) -> object:
        engine, rng = Engine(model, prefix_cache=False), random.Random(1)
        executor = native_executable(model).executor
        number = engine.add(prompt, params)
        chunks = []
        while engine.busy:
            if change and rng.random() < 0.5:
                executor.crowd(rng.randint(0, 4))
            chunks += engine.step()
        executor.crowd(0)
        return collect(chunk for chunk in chunks if chunk.request == number)

    assert answer(change=True) == answer(change=False)


def test_it_gets_on_beside_busy_processes(tiny_gguf: Path) -> None:
    model = load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=_native.usable_cores()))
    engine = Engine(model)
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(_native.usable_cores())]
    try:
        params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
        for _ in range(5):
            assert len(collect(engine.run(engine.add([1, 2, 3], params)))[0].tokens) == 400
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
