"""Serving, measured through HTTP: streams side by side, a long prompt among them, cached prefixes, and idling."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.bench.load import Endpoint, Sample, ask, ask_minimally, percentile, side_by_side, summary, touch
from slipstream.bench.metered import Reading, processor_seconds
from slipstream.engine import Engine, LoadOptions
from slipstream.engine.cost import cost_model
from slipstream.engine.drafters import Speculative, load_speculative
from slipstream.errors import SlipstreamError
from slipstream.program import KVFormat
from slipstream.program.sampling import SamplingParams

Progress = Callable[[str, int, int], None]
VOCABULARY = 200
"""Prompts are random ids below this."""
ALONE_PROMPT, ALONE_ANSWER, TURNS = 32, 128, 7
TARGET = 1.25
"""Times a lone stream's TPOT that the target is set to: the slowest requests of a hundred stay within twice then."""
TOUCH_EVERY = 0.05
"""Seconds between two looks whether the server still answers under load."""
TICK = 1e-6
"""Seconds that a token takes at the least: a toy's whole answer may come in one piece."""
LONG_PROMPT, CACHED_PROMPT = 4000, 2000
BESIDE_ANSWER, INTERFERENCE_TURNS = 600, 5
"""Tokens of each stream that a long prompt comes to, so many that they outlast it; and turns of it."""
START_SECONDS, IDLE_SECONDS = 300.0, 5.0


@dataclass(frozen=True, slots=True)
class Running:
    """A server that was started for measuring."""

    at: Endpoint
    process: subprocess.Popen[str]

    def card(self) -> dict[str, Any]:
        """What it says of its model."""
        with urllib.request.urlopen(f"http://{self.at.host}:{self.at.port}/v1/models") as answer:
            card: dict[str, Any] = json.load(answer)["data"][0]
            return card


@contextmanager
def server(model: str, options: Sequence[str]) -> Iterator[Running]:
    """Start `slipstream serve` on a free port. Raises SlipstreamError with what it said if it does not start."""
    command = [sys.executable, "-m", "slipstream", "serve", model, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            if match := re.search(r"http://([\d.]+):(\d+)", line):
                yield Running(Endpoint(match[1], int(match[2])), process)
                return
        raise SlipstreamError("the server did not start: " + "".join(said)[-2000:])
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def measure(
    model: str, options: Sequence[str], streams: Sequence[int], prompt: int, answer: int, progress: Progress
) -> dict[str, Any]:
    """Keys: serve_streams (by their number), half_load, one_stream, interference, prefix, idle."""
    rng = random.Random(0)

    def fresh(length: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(length)]

    async def one(index: int) -> Sample:
        return await ask(running.at, fresh(prompt), answer, seed=index)

    with server(model, options) as running:
        fresh_memory = _resident(running)

        asyncio.run(side_by_side(1, 2, one))
        by_streams, touched = {}, list[float]()
        for done, count in enumerate(streams):
            progress("streams", done, len(streams))
            before = Reading.of(running.at, running.process.pid)
            samples, touched = asyncio.run(_touched(running, side_by_side(count, max(6, 2 * count), one)))
            after = Reading.of(running.at, running.process.pid)
            host = after.since(before, answer * len(samples))
            by_streams[str(count)] = summary(samples, answer) | {"host_us": host}
        progress("half of what it can do", 0, 1)
        busiest = max(s["output_tok_s"] for s in by_streams.values())
        half = asyncio.run(_half_load(busiest / 2 / answer, max(60, 2 * max(streams)), one))
        alone = {name: max(by_streams[str(min(streams))]["tpot"][name], TICK) for name in ("median", "p99")}
        progress("one stream beside one in process", 0, 1)
        one_stream = _one_stream(running, model, options, fresh)
        progress("a long prompt among streams", 0, 1)
        interference = asyncio.run(_interference(running, fresh))
        progress("cached prefixes", 0, 1)
        prefix = asyncio.run(_prefix(running, fresh))
        progress("idle", 0, 1)
        idle = _idle(running)
    target = TARGET * alone["median"]
    with server(model, [*options, "--tpot-target", f"{target:.7f}"]) as running:
        progress("half of what it can do, with a target", 0, 1)
        asyncio.run(side_by_side(1, 2, one))
        kept = asyncio.run(_half_load(busiest / 2 / answer, len(half), one))
    return {
        "model": model,
        "options": list(options),
        "prompt": prompt,
        "answer": answer,
        "serve_streams": by_streams,
        "api_under_load": {"median": statistics.median(touched), "p99": percentile(touched, 0.99)},
        "half_load": summary(half, answer) | _over_alone(half, answer, alone),
        "half_load_with_target": summary(kept, answer) | {"tpot_target": target} | _over_alone(kept, answer, alone),
        "one_stream": one_stream,
        "interference": interference,
        "prefix": prefix,
        "idle": idle | fresh_memory,
    }


async def _touched(running: Running, work: Awaitable[list[Sample]]) -> tuple[list[Sample], list[float]]:
    """What some work came to, and how long the server took to name its model meanwhile, again and again."""
    touched, working = list[float](), asyncio.ensure_future(work)
    while not working.done():
        touched.append(await touch(running.at, "/v1/models"))
        await asyncio.wait([working], timeout=TOUCH_EVERY)
    return working.result(), touched


def _over_alone(samples: Sequence[Sample], answer: int, alone: dict[str, float]) -> dict[str, float]:
    """The slowest answers' time per token over a lone stream's: over its median, and over its slowest answers'."""
    p99 = percentile([s.whole_tpot(answer) for s in samples], 0.99)
    return {"p99_tpot_over_alone": p99 / alone["median"], "p99_tpot_over_p99_alone": p99 / alone["p99"]}


async def _half_load(rate: float, count: int, one: Callable[[int], Awaitable[Sample]]) -> list[Sample]:
    """`count` requests at random times, `rate` a second."""
    rng = random.Random(1)

    async def later(index: int, at: float) -> Sample:
        await asyncio.sleep(at)
        return await one(index)

    times = list(itertools.accumulate(rng.expovariate(rate) for _ in range(count)))
    return await asyncio.gather(*(later(index, at) for index, at in enumerate(times)))


def _one_stream(
    running: Running, model: str, options: Sequence[str], fresh: Callable[[int], list[int]]
) -> dict[str, Any]:
    """Tokens a second of one stream through HTTP and of the same model in this process, in turns."""
    named = dict(zip(options[::2], options[1::2], strict=True))
    load = LoadOptions(
        kv_format=KVFormat(named.get("--kv-cache-dtype", "bf16")),
        quantization=named.get("--quantization", "none"),  # type: ignore[arg-type]
        threads=int(named["--threads"]) if "--threads" in named else None,
    )
    loaded, controller = load_speculative(model, load, Speculative.parse(named.get("--speculative", "auto")))
    engine = Engine(loaded, cost_model(loaded), prefix_cache=False, controller=controller)
    http, inside = [], []
    for turn in range(TURNS):
        prompt = fresh(ALONE_PROMPT)
        params = SamplingParams(temperature=0.7, seed=turn, max_tokens=ALONE_ANSWER, ignore_eos=True)
        number = engine.add(prompt, params)
        list(engine.run(number))
        inside.append(engine.timings[number].decode_tok_s)
        http.append(ask_minimally(running.at, prompt, ALONE_ANSWER, turn))
    turns = [h / i for h, i in zip(http, inside, strict=True)]
    return {
        "http_tok_s": statistics.median(http),
        "in_process_tok_s": statistics.median(inside),
        "ratio": statistics.median(turns),
        "turns": turns,
    }


async def _interference(running: Running, fresh: Callable[[int], list[int]]) -> dict[str, Any]:
    """Gaps of four running streams without, and while a long prompt comes in. The prompt's own first token too.

    Counted are gaps that end after all four have begun, and beside the prompt only those until its first token.
    """

    async def streams() -> list[Sample]:
        return await asyncio.gather(*(ask(running.at, fresh(64), BESIDE_ANSWER, seed=i) for i in range(4)))

    async def long_prompt() -> Sample:
        await asyncio.sleep(0.5)
        return await ask(running.at, fresh(LONG_PROMPT), 2)

    alone, beside, counted, intruders = [], [], [], []
    for _ in range(INTERFERENCE_TURNS):
        undisturbed = await streams()
        alone.append(percentile(_gaps(undisturbed, 0.0, math.inf), 0.99))
        disturbed, intruder = await asyncio.gather(streams(), long_prompt())
        gaps = _gaps(disturbed, intruder.sent, intruder.tokens[0])
        beside.append(percentile(gaps, 0.99))
        counted.append(len(gaps))
        intruders.append(intruder.ttft)
    turns = [b / a for a, b in zip(alone, beside, strict=True)]
    return {
        "prompt": LONG_PROMPT,
        "gap_p99_alone": statistics.median(alone),
        "gap_p99_beside": statistics.median(beside),
        "gaps_beside": counted,
        "ratio": statistics.median(turns),
        "turns": turns,
        "long_prompt_ttft": statistics.median(intruders),
    }


def _gaps(samples: Sequence[Sample], begin: float, end: float) -> list[float]:
    """Gaps, in seconds, that end after `begin` and begin before `end`, all streams having begun."""
    begin = max(begin, *(sample.tokens[0] for sample in samples))
    pairs = (pair for sample in samples for pair in zip(sample.tokens, sample.tokens[1:], strict=False))
    return [max(b - a, TICK) for a, b in pairs if b > begin and a < end] or [TICK]


async def _prefix(running: Running, fresh: Callable[[int], list[int]]) -> dict[str, Any]:
    """Time to the first token of a prompt that is new, and of the same one again; medians of five."""
    cold, warm = [], []
    for _ in range(5):
        prompt = fresh(CACHED_PROMPT)
        cold.append((await ask(running.at, prompt, 2)).ttft)
        warm.append((await ask(running.at, prompt, 2)).ttft)
    turns = [w / c for w, c in zip(warm, cold, strict=True)]
    return {
        "prompt": CACHED_PROMPT,
        "cold_ttft": statistics.median(cold),
        "warm_ttft": statistics.median(warm),
        "ratio": statistics.median(turns),
        "turns": turns,
    }


def _idle(running: Running) -> dict[str, Any]:
    """Share of a core that the server and its engine use when nobody asks."""
    pids = _processes(running)

    def seconds() -> float:
        return sum(map(processor_seconds, pids))

    time.sleep(1.0)
    before = seconds()
    time.sleep(IDLE_SECONDS)
    return {"cpu": (seconds() - before) / IDLE_SECONDS}


def _processes(running: Running) -> list[int]:
    """The server and its engine."""
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    return [running.process.pid, *map(int, children)]


def _resident(running: Running) -> dict[str, int]:
    """Memory of a server that was never asked, with the weights and without; its cache is not there yet."""
    resident = 0
    for pid in _processes(running):
        match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        resident += int(match[1]) * 1024 if match else 0
    return {"resident_bytes": resident, "beyond_weights_bytes": resident - int(running.card()["weight_bytes"])}
