"""Desk: where requests wait whose grammar is being compiled, so that nobody else waits for that."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from slipstream.engine.grammar import Grammars
from slipstream.engine.messages import Submit
from slipstream.errors import UsageError

NICENESS = 10
"""Of the thread that compiles: the kernels' threads go first."""


class Desk:
    """Compiles one grammar at a time on a thread of its own."""

    def __init__(self, grammars: Grammars):
        self._grammars = grammars
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: dict[int, tuple[Submit, Future[object]]] = {}

    @property
    def waiting(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiting)

    def take(self, request: Submit) -> bool:
        """Whether a request can run at once; if not, it waits here."""
        grammar = request.params.grammar
        if not grammar or self._grammars.knows(grammar):
            return True
        self._thread = self._thread or ThreadPoolExecutor(1, "grammars", initializer=_give_way)
        self._waiting[request.number] = request, self._thread.submit(self._grammars.learn, grammar)
        return False

    def done(self) -> list[tuple[Submit, str]]:
        """Requests that need not wait any more, with what is wrong with their grammar, if anything is."""
        ended = [number for number, (_, compiled) in self._waiting.items() if compiled.done()]
        return [(request, _problem(compiled)) for request, compiled in map(self._waiting.pop, ended)]

    def drop(self, number: int) -> bool:
        """Forget a request; whether it waited here."""
        found = self._waiting.pop(number, None)
        if found is not None:
            found[1].cancel()
        return found is not None


def _problem(compiled: Future[object]) -> str:
    error = compiled.exception()
    if error is None:
        return ""
    return str(error) if isinstance(error, UsageError) else f"the grammar cannot be compiled: {type(error).__name__}"


def _give_way() -> None:
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
