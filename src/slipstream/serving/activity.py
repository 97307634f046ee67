"""Activity: requests for answers are counted where they are let in, and whoever waits for one is told at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Activity:
    """How many requests are open, and how many have begun since the server's start. Use from one event loop."""

    def __init__(self) -> None:
        self.open = self.begun = 0
        self._ending = False
        self._news = asyncio.Event()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request while it runs."""
        self.open, self.begun = self.open + 1, self.begun + 1
        self._tell()
        try:
            yield
        finally:
            self.open -= 1

    def end(self) -> None:
        """Nobody waits for anything any more: the server is going away."""
        self._ending = True
        self._tell()

    async def after(self, begun: int) -> None:
        """Wait until one is open, or more than so many have begun, or the server is going away."""
        if not (self.open or self.begun > begun or self._ending):
            await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()  # who comes later waits for what comes later
