"""What recording costs: two servers of the same model, one of which records, asked the same in turns."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.bench.load import Endpoint, Sample, ask, side_by_side, summary
from slipstream.bench.machine import spread
from slipstream.bench.serve import VOCABULARY, Progress, server
from slipstream.training.store import TrafficStore


def measure(
    model: str, options: Sequence[str], streams: int, prompt: int, answer: int, turns: int, progress: Progress
) -> dict[str, Any]:
    """Keys: recording (throughput with it over throughput without, by turns), tok_s, tok_s_without, recorded, bytes."""
    rng = random.Random(0)

    def rate(at: Endpoint) -> float:
        async def one(index: int) -> Sample:
            return await ask(at, [rng.randrange(VOCABULARY) for _ in range(prompt)], answer)

        return float(summary(asyncio.run(side_by_side(streams, streams, one)), answer)["output_tok_s"])

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "traffic.db"
        with server(model, [*options, "--record", str(file)]) as with_it, server(model, options) as without:
            for at in (with_it.at, without.at):
                rate(at)
            pairs = []
            for turn in range(turns):
                order = (with_it.at, without.at)[:: 1 if turn % 2 else -1]
                rates = {at: rate(at) for at in order}
                pairs.append((rates[with_it.at], rates[without.at]))
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
        "recorded": recorded,
        "bytes": size,
    }
