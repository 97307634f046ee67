"""What a training in idle time costs whoever is served: a server, asked in turns with one beside it and without."""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slipstream.bench.load import Endpoint, Sample, ask, summary
from slipstream.bench.machine import spread
from slipstream.bench.serve import VOCABULARY, Progress, server
from slipstream.errors import SlipstreamError
from slipstream.training.idle import EVERY, Spent, run_when_idle
from slipstream.training.remote import Server

LONGEST = "24h"
"""The training's budget: more than it gets."""
STOPPED_SECONDS = 30.0
"""Within which it must rest when told so."""


class _OverError(Exception):
    """Measuring has ended, and so does the training."""


class _Training:
    """`drafter train`, as `drafter watch --auto` runs it, but for the turns in which it is to rest."""

    def __init__(self, command: Sequence[str], at: Server, quiet: float):
        self.resting, self.over, self.spent = True, False, Spent()
        self._command, self._at, self._quiet = command, at, quiet
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with suppress(_OverError):
            run_when_idle(self._command, self._busy, self._quiet, self.spent)

    def _busy(self, wait: float) -> bool:
        if self.over:
            raise _OverError
        return self.resting or self._at.busy(min(wait, EVERY))  # what is told here is seen soon, too

    def turn(self, *, resting: bool) -> None:
        """Let it run from now on, or see to it that it rests. Raises SlipstreamError if it has ended."""
        self.resting, held, begun = resting, self.spent.held, time.monotonic()
        while resting and self._thread.is_alive() and self.spent.held <= held:
            if time.monotonic() - begun > STOPPED_SECONDS:
                raise SlipstreamError("the training did not stop")
            time.sleep(EVERY / 4)
        if not self._thread.is_alive():
            raise SlipstreamError("the training has ended early: drafter train says why")

    def end(self) -> None:
        """End it."""
        self.over = True
        self._thread.join()


@contextmanager
def _training(model: str, traffic: Path, at: Endpoint, quiet: float) -> Iterator[_Training]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "slipstream", "drafter", "train", "--json", "--model", model, "--traffic",
            str(traffic), "--out", folder, "--budget", LONGEST,
        ]  # fmt: skip
        training = _Training(command, Server(f"http://{at.host}:{at.port}"), quiet)
        try:
            yield training
        finally:
            training.end()


def measure(
    model: str,
    traffic: Path,
    options: Sequence[str],
    requests: int,
    turns: int,
    pause: float,
    quiet: float,
    prompt: int,
    answer: int,
    progress: Progress,
) -> dict[str, Any]:
    """Keys: idle_training (ttft and tpot with it over those without, medians, by turns), with_it and without (all of
    their requests), trained_seconds.

    A request comes after a pause in which the training has begun again; in turns without it, it is stopped throughout.
    """
    rng = random.Random(0)

    def asked(at: Endpoint) -> list[Sample]:
        found = []
        for _ in range(requests):
            time.sleep(pause)
            found.append(asyncio.run(ask(at, [rng.randrange(VOCABULARY) for _ in range(prompt)], answer)))
        return found

    samples: dict[str, list[list[Sample]]] = {"with_it": [], "without": []}
    trained = dict.fromkeys(samples, 0.0)
    with server(model, options) as running, _training(model, traffic, running.at, quiet) as training:
        training.turn(resting=True)
        asked(running.at)
        for turn in range(turns):
            for name in list(samples)[:: 1 if turn % 2 else -1]:
                training.turn(resting=name == "without")
                ran = training.spent.ran
                samples[name].append(asked(running.at))
                trained[name] += training.spent.ran - ran
            progress("turns", turn + 1, turns)
    by_turn = {name: [summary(found, answer) for found in those] for name, those in samples.items()}

    def ratios(what: str) -> list[float]:
        pairs = zip(by_turn["with_it"], by_turn["without"], strict=True)
        return [beside[what]["median"] / max(without[what]["median"], 1e-9) for beside, without in pairs]

    return {
        "model": model,
        "options": list(options),
        "requests": requests,
        "pause": pause,
        "prompt": prompt,
        "answer": answer,
        "idle_training": {what: spread(ratios(what)) for what in ("ttft", "tpot")},
        **{name: summary([one for found in those for one in found], answer) for name, those in samples.items()},
        "trained_seconds": trained,
    }
