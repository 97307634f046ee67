"""A request as the engine keeps it: whose it is, what became of it and when."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from slipstream.speculation import Counts

Whose = tuple[str, str]
"""A tenant, and a cache salt."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Whose request it is and how it is to be treated: a lower priority goes first, `timeout` is in seconds.

    Only requests of one tenant and one `cache_salt` share cached prefixes and compiled grammars. Requests with one
    `tag` are traffic of one kind: drafts are expected to fare alike. It was `asked` for at that time by `perf_counter`,
    which the processes of a machine share; None: when the engine hears of it.
    """

    tenant: str = ""
    priority: int = 0
    timeout: float = math.inf
    cache_salt: str = ""
    tag: str = ""
    asked: float | None = None

    @property
    def whose(self) -> Whose:
        """Who may find again what was made for this request."""
        return self.tenant, self.cache_salt


@dataclass(slots=True)
class Timings:
    """Seconds and tokens of one request; None until it happened. What was `generated` is counted when a choice ends."""

    arrived: float
    prompt_tokens: int
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    generated: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    drafts: Counts = field(default_factory=Counts)
    choices: int = 1

    @property
    def queue_seconds(self) -> float:
        """From arrival to the first step, or to the end if there was none."""
        return (self.started or self.finished or self.arrived) - self.arrived

    @property
    def prefill_seconds(self) -> float:
        """From arrival to the first token."""
        return (self.first_token or self.arrived) - self.arrived

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last; 0 without one."""
        if self.first_token is None or self.finished is None:
            return 0.0
        return self.finished - self.first_token

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second that each choice had after its first one, on average; 0 if there were none."""
        later = self.generated / self.choices - 1.0
        return later / self.decode_seconds if later > 0 and self.decode_seconds > 0 else 0.0


@dataclass(slots=True)
class Request:
    """An unfinished request, and its choices that are still open."""

    timings: Timings
    open: set[int]
