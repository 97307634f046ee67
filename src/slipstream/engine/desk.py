"""Desk: where requests wait whose grammar is being compiled, so that nobody else waits for that.

Tenants take turns, so that the many grammars of one do not hold up those of the others. One that takes too long is
given up: its request is told so while the compiler, which has bounds of its own, comes to its end.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from slipstream.engine.grammar import Grammars
from slipstream.engine.messages import Submit
from slipstream.errors import UsageError

NICENESS = 10
"""Of the thread that compiles: the kernels' threads go first."""
MOST_SECONDS = 2.0
"""What compiling a grammar may take."""


@dataclass
class _Turn:
    """What is being compiled: for whom (None: nobody any more), and since when."""

    request: Submit | None
    compiled: Future[Any]
    begun: float


class Desk:
    """Compiles one grammar at a time on a thread of its own."""

    def __init__(self, grammars: Grammars):
        self._grammars = grammars
        self._thread: ThreadPoolExecutor | None = None
        self._queues: OrderedDict[str, deque[Submit]] = OrderedDict()
        """By tenant, in the order of their turns."""
        self._turn: _Turn | None = None

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        queued = sum(map(len, self._queues.values())) if self._queues else 0
        return queued + (self._turn is not None and self._turn.request is not None)

    def take(self, request: Submit) -> bool:
        """Whether a request can run at once; if not, it waits here."""
        grammar = request.params.grammar
        if not grammar or self._grammars.knows(grammar, request.terms.whose):
            return True
        self._queues.setdefault(request.terms.tenant, deque()).append(request)
        self._begin()
        return False

    def done(self) -> list[tuple[Submit, str]]:
        """Requests that need not wait any more, with what is wrong with their grammar, if anything is."""
        ended: list[tuple[Submit, str]] = []
        if (turn := self._turn) is not None:
            problem = None
            if turn.compiled.done():
                problem, self._turn = _problem(turn.compiled), None
            elif time.monotonic() - turn.begun > MOST_SECONDS:
                problem = f"the grammar takes longer than {MOST_SECONDS:g} s to compile: make it simpler"
            if problem is not None and turn.request is not None:
                ended.append((turn.request, problem))
                turn.request = None
        self._begin()
        return ended

    def drop(self, number: int) -> bool:
        """Forget a request; whether it waited here."""
        if self._turn is not None and self._turn.request is not None and self._turn.request.number == number:
            self._turn.request = None
            return True
        for tenant, queue in self._queues.items():
            for request in queue:
                if request.number == number:
                    queue.remove(request)
                    if not queue:
                        del self._queues[tenant]
                    return True
        return False

    def _begin(self) -> None:
        """The next turn, if the thread is free."""
        if self._turn is not None or not self._queues:
            return
        tenant, queue = next(iter(self._queues.items()))
        request = queue.popleft()
        del self._queues[tenant]
        if queue:
            self._queues[tenant] = queue  # behind the others
        self._thread = self._thread or ThreadPoolExecutor(1, "grammars", initializer=_give_way)
        compiled = self._thread.submit(self._grammars.learn, request.params.grammar, request.terms.whose)
        self._turn = _Turn(request, compiled, time.monotonic())


def _problem(compiled: Future[Any]) -> str:
    error = compiled.exception()
    if error is None:
        return ""
    return str(error) if isinstance(error, UsageError) else f"the grammar cannot be compiled: {type(error).__name__}"


def _give_way() -> None:
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
