"""Peers: another engine on the same file, in turns with ours, so that their ratio comes from one run.

The peer lives in a Python environment of its own and is driven through a pipe by `peer_llama_cpp.py`; while
one engine works the other one waits.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from slipstream.bench.decode import decode_rows
from slipstream.bench.machine import native_only, spread
from slipstream.bench.prefill import prefill_chunks
from slipstream.engine import Model
from slipstream.errors import SlipstreamError, UsageError
from slipstream.program import BLOCK_SLOTS
from slipstream.program.sampling import Draw, DrawColumns, SamplingParams

Progress = Callable[[int, int], None]
DRIVER = Path(__file__).with_name("peer_llama_cpp.py")
STEPS = 24
REST = 0.2
"""Seconds between two engines' work: the other one's threads have stopped spinning by then."""


class LlamaCpp:
    """llama.cpp through llama-cpp-python, in the environment of the interpreter `python`."""

    def __init__(self, python: Path, file: Path, context: int, threads: int):
        if not python.exists():
            raise UsageError(f"--llama-cpp: {python} does not exist; give the python of an environment with it")
        command = [str(python), str(DRIVER), str(file), str(context), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._answer()["version"]

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def decode(self, context: int, steps: int) -> float:
        """Median seconds of a one-row step after `context` tokens."""
        return statistics.median(self._ask("decode", context, steps))

    def prefill(self, tokens: int) -> float:
        """Seconds to read a prompt."""
        return self._ask("prefill", tokens, 1)[0]

    def _ask(self, what: str, first: int, second: int) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {first} {second}\n")
        self._process.stdin.flush()
        return [float(seconds) for seconds in self._answer()["seconds"]]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SlipstreamError(f"the peer ended with code {self._process.wait()}; its message is above")
        return dict(json.loads(line))


def measure(
    model: Model, peer: LlamaCpp, context: int, prompt: int, turns: int, progress: Progress | None = None
) -> dict[str, Any]:
    """Medians over turns of pure read, our decode and prefill, and the peer's; ratios are of the same turn."""
    executable = native_only(model.executable)
    rows = decode_rows(1, context, context // BLOCK_SLOTS + 1, model.config.vocabulary)
    draws = DrawColumns.of([Draw(SamplingParams(temperature=0.7), 0, 0, context + 1)])
    chunks = prefill_chunks(model, prompt)
    seconds: dict[str, list[float]] = {
        key: [] for key in ("read", "decode", "prefill", "their_decode", "their_prefill")
    }

    def timed(step: Callable[[], object]) -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    for turn in range(turns + 1):
        took = {
            "read": statistics.median(executable.read_weights() for _ in range(3)),
            "decode": statistics.median(timed(lambda: executable.step(rows, draws)) for _ in range(STEPS)),
            "prefill": timed(lambda: [executable.step(chunk, None) for chunk in chunks]),
        }
        time.sleep(REST)
        took |= {"their_decode": peer.decode(context, STEPS), "their_prefill": peer.prefill(prompt)}
        time.sleep(REST)
        for key, value in took.items() if turn else ():
            seconds[key].append(value)
        if progress:
            progress(turn, turns)
    ceilings = [executable.weight_bytes / s / executable.bytes_per_token for s in seconds["read"]]

    def rates(key: str, tokens: int) -> list[float]:
        return [tokens / s for s in seconds[key]]

    def ratio(ours: str, theirs: str) -> list[float]:
        return [b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True)]

    def shares(key: str) -> list[float]:
        return [1 / s / ceiling for s, ceiling in zip(seconds[key], ceilings, strict=True)]

    return {
        "model": model.reference,
        "peer": f"llama.cpp (llama-cpp-python {peer.version})",
        "context": context,
        "prompt": prompt,
        "turns": turns,
        "threads": executable.threads,
        "isa": executable.isa,
        "ceiling_tok_s": statistics.median(ceilings),
        "decode_tok_s": statistics.median(rates("decode", 1)),
        "prefill_tok_s": statistics.median(rates("prefill", prompt)),
        "peer_decode_tok_s": statistics.median(rates("their_decode", 1)),
        "peer_prefill_tok_s": statistics.median(rates("their_prefill", prompt)),
        "decode_ratio": statistics.median(ratio("decode", "their_decode")),
        "prefill_ratio": statistics.median(ratio("prefill", "their_prefill")),
        "fraction_of_ceiling": statistics.median(shares("decode")),
        "peer_fraction_of_ceiling": statistics.median(shares("their_decode")),
        "spread": {
            "decode_ratio": spread(ratio("decode", "their_decode")),
            "prefill_ratio": spread(ratio("prefill", "their_prefill")),
            "fraction_of_ceiling": spread(shares("decode")),
        },
    }
