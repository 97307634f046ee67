"""Another server beside ours: the same requests to both, in turns, so that their ratio comes from one run."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from typing import Any

from slipstream.bench.load import Endpoint, Sample, ask, side_by_side, summary
from slipstream.bench.serve import VOCABULARY, Progress, server
from slipstream.roofline import find_source

TURNS = 3


def precision_of(model: str, card: dict[str, Any]) -> dict[str, str]:
    """Of what precision weights and cache are, by the file's header and the server's card of its model."""
    stored = find_source(model).precision
    weights = stored.name if stored else "as stored"
    return {"weights": weights, "kv_cache": card["kv_cache_dtype"], "numerics": card["numerics"]}


def beside(
    model: str,
    options: Sequence[str],
    peer: Endpoint,
    streams: Sequence[int],
    prompt: int,
    answer: int,
    progress: Progress,
) -> dict[str, Any]:
    """Keys: beside (by streams: ours, theirs, their ratio), peer_model, served (ours). No prompt is used twice."""
    rng = random.Random(0)

    def rounds(at: Endpoint, count: int) -> list[Sample]:
        async def one(index: int) -> Sample:
            # Without a seed: vLLM 0.32's CPU build ends with an error when a request has one.
            return await ask(at, [rng.randrange(VOCABULARY) for _ in range(prompt)], answer)

        return asyncio.run(side_by_side(count, count, one))

    by_streams = {}
    with server(model, options) as running:
        served = precision_of(model, running.card())
        for at in (running.at, peer):
            rounds(at, 1)
        for done, count in enumerate(streams):
            pairs = []
            for turn in range(TURNS):
                progress("streams", done * TURNS + turn, len(streams) * TURNS)
                pairs.append(tuple(summary(rounds(at, count), answer) for at in (running.at, peer)))
            ratios = [ours["output_tok_s"] / theirs["output_tok_s"] for ours, theirs in pairs]
            middle = pairs[ratios.index(statistics.median_low(ratios))]
            by_streams[str(count)] = {
                "ours": middle[0],
                "theirs": middle[1],
                "ratio": statistics.median(ratios),
                "ratios": ratios,
            }
    return {"model": model, "options": list(options), "prompt": prompt, "answer": answer, "peer_model": peer.model,
            "served": served, "beside": by_streams}  # fmt: skip
