"""An idle server is idle: it neither spins nor looks again and again whether there is something to do."""

from __future__ import annotations

import time
from pathlib import Path

from tests.serving.conftest import Server
from tests.serving.test_faults import CHAT, body, idle, ticks

SECONDS = 5.0
MOST_WAKE_UPS = 30
"""A second, of all threads: the server's loop looks at the clock ten times, and asks the engine once how it is."""


def wake_ups(pid: int) -> int:
    """Times that a process's threads have gone to sleep, which is as often as they woke."""
    counts = [
        (task / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2]
        for task in Path(f"/proc/{pid}/task").iterdir()
    ]
    return sum(int(count.split()[0]) for count in counts)


def test_idle_means_idle(server: Server) -> None:
    """Server and engine together: at most 1 % of a core, which shows what spins; few wake-ups, which shows what polls.
    Both are counted, not timed: other work on the machine makes no difference.
    """
    with server.client() as http:
        assert http.post(CHAT, json=body(20)).status_code == 200
    idle(server)
    time.sleep(1.0)  # the engine has looked itself over
    pids = (server.process.pid, server.engine_pid())
    begun, computed, woken = time.monotonic(), sum(map(ticks, pids)), sum(map(wake_ups, pids))
    time.sleep(SECONDS)
    seconds = time.monotonic() - begun
    assert sum(map(ticks, pids)) - computed <= seconds, "hundredths of a second"
    assert sum(map(wake_ups, pids)) - woken <= MOST_WAKE_UPS * seconds
