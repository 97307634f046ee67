"""Idle: a command that runs only while a server has nothing to do, at the lowest priority."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

EVERY, QUIET = 0.25, 3.0
"""Seconds between two looks at a busy server, and for which it must have been idle before the command goes on."""
WAIT = 1.0
"""Seconds for which a request is waited for before it is seen whether the command has ended."""
NICENESS = 19


@dataclass
class Spent:
    """Seconds that a command ran, and that it was held."""

    ran: float = 0.0
    held: float = 0.0


def run_when_idle(
    command: Sequence[str], busy: Callable[[float], bool], quiet: float = QUIET, spent: Spent | None = None
) -> tuple[int, Spent]:
    """Run a command to its end, stopped whenever `busy` says so; returns its exit status and where the time went.

    `busy` is given the seconds for which it may wait for a request while there is none: the command is stopped when it
    answers. The command is ended with this process, or when `busy` raises, and gets no terminal signals of its own.
    `spent` can be looked at meanwhile.
    """
    process = subprocess.Popen(["nice", "-n", str(NICENESS), *command], start_new_session=True)
    _give_way(process.pid)
    spent, held, last_busy = spent or Spent(), False, -quiet
    seen = time.monotonic()
    try:
        while process.poll() is None:
            looked = time.monotonic()
            found = busy(0.0 if held else WAIT)
            now = time.monotonic()
            if found:
                last_busy = now
            hold = now - last_busy < quiet
            if hold != held:
                os.killpg(process.pid, signal.SIGSTOP if hold else signal.SIGCONT)
            spent.held, spent.ran = spent.held + held * (now - seen), spent.ran + (not held) * (now - seen)
            held, seen = hold, now
            time.sleep(max(0.0, looked + EVERY - time.monotonic()))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGCONT)
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return process.returncode, spent


def _give_way(pid: int) -> None:
    """Let a process, and whatever it starts, run only where nobody else wants to, as far as the system can say so.

    A nice process still gets its turns, and whoever waits for a thread that gave one up waits for milliseconds.
    """
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
