"""What serving costs beside the kernels: the engine's own seconds a step, from /metrics, and the server's a token."""

from __future__ import annotations

import os
import re
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from slipstream.bench.load import Endpoint
from slipstream.engine.client import PING_EVERY

OUTSIDE_KERNELS = ("scheduling", "dispatch", "output", "outside")
"""Parts of a step on the critical path that are no kernels': planning, the way in and out, tokens to text, messages."""
_SERIES = re.compile(r'^slipstream_(steps|seconds)_total\{(?:[^}]*part="(\w+)")?[^}]*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Reading:
    """Sums since a server's start: steps, seconds by part, and seconds of a processor that its own process took."""

    steps: float
    seconds: dict[str, float]
    server: float

    @classmethod
    def of(cls, at: Endpoint, pid: int) -> Reading:
        """As of now; `pid` is the server's process. Nobody may be asking: the engine's news take a second to come."""
        taken = processor_seconds(pid)
        time.sleep(1.5 * PING_EVERY)
        with urllib.request.urlopen(f"http://{at.host}:{at.port}/metrics", timeout=30) as answer:
            found = _SERIES.findall(answer.read().decode())
        steps = sum(float(value) for name, _, value in found if name == "steps")
        parts = {part: float(value) for name, part, value in found if name == "seconds"}
        return cls(steps, parts, taken)

    def since(self, before: Reading, tokens: int) -> dict[str, float]:
        """Microseconds a step by part, `outside_kernels` in all, and of the server's process for each token."""
        steps = max(self.steps - before.steps, 1.0)
        each = {
            part: (self.seconds.get(part, 0.0) - before.seconds.get(part, 0.0)) / steps * 1e6
            for part in OUTSIDE_KERNELS
        }
        server = (self.server - before.server) / max(tokens, 1) * 1e6
        return each | {"outside_kernels": sum(each.values()), "steps": steps, "server_us_a_token": server}


def processor_seconds(pid: int) -> float:
    """Of a processor that a process took since its start, its children's left out."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
