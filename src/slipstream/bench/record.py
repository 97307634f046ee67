"""What recording costs: two servers of the same model, one of which records, asked the same in turns."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.bench.load import Sample, ask, side_by_side, summary
from slipstream.bench.machine import spread
from slipstream.bench.metered import processor_seconds
from slipstream.bench.serve import VOCABULARY, Progress, Running, server
from slipstream.training.store import TrafficStore


def measure(
    model: str, options: Sequence[str], streams: int, prompt: int, answer: int, turns: int, progress: Progress
) -> dict[str, Any]:
    """Keys: recording (throughput with it over throughput without, by turns), tok_s, tok_s_without, recorded, bytes;
    server_us_a_token and server_us_a_token_without, of a processor, by the servers' own processes, which record.

    Turns differ by more than recording takes: the processor's time tells what that is.
    """
    rng = random.Random(0)

    def rate(of: Running) -> tuple[float, float]:
        async def one(index: int) -> Sample:
            return await ask(of.at, [rng.randrange(VOCABULARY) for _ in range(prompt)], answer)

        before = processor_seconds(of.process.pid)
        found = summary(asyncio.run(side_by_side(streams, streams, one)), answer)
        return float(found["output_tok_s"]), processor_seconds(of.process.pid) - before

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "traffic.db"
        with server(model, [*options, "--record", str(file)]) as with_it, server(model, options) as without:
            for one in (with_it, without):
                rate(one)
            pairs, spent = [], [0.0, 0.0]
            for turn in range(turns):
                order = (with_it, without)[:: 1 if turn % 2 else -1]
                rates = {one.process.pid: rate(one) for one in order}
                ours, theirs = rates[with_it.process.pid], rates[without.process.pid]
                pairs.append((ours[0], theirs[0]))
                spent = [spent[0] + ours[1], spent[1] + theirs[1]]
                progress("turns", turn + 1, turns)
        with TrafficStore(file, create=False) as store:
            recorded, size = len(store), store.bytes
    return {
        "model": model,
        "options": list(options),
        "streams": streams,
        "prompt": prompt,
        "answer": answer,
        "recording": spread([ours / theirs for ours, theirs in pairs]),
        "tok_s": statistics.median(ours for ours, _ in pairs),
        "tok_s_without": statistics.median(theirs for _, theirs in pairs),
        "server_us_a_token": spent[0] / (turns * streams * answer) * 1e6,
        "server_us_a_token_without": spent[1] / (turns * streams * answer) * 1e6,
        "recorded": recorded,
        "bytes": size,
    }
