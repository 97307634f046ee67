"""What speculation multiplies the ceiling by: S = τ / (v(K+1) + d(K) + o), and the simple τ / (1 + cK).

Times are in steps of one row. v(n) is a verification of n rows, d(K) the drafting of K tokens, o everything
else a round costs. Sources: Leviathan et al., arXiv 2211.17192 (τ of a chain); Chen et al., arXiv 2302.01318.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.errors import UsageError

Cost = Callable[[int], float]


def tau_of(acceptance: float, draft_len: int) -> float:
    """Mean tokens of a round when each of `draft_len` drafted tokens is accepted with one probability."""
    if not 0.0 <= acceptance <= 1.0:
        raise UsageError(f"acceptance must be from 0 to 1, not {acceptance}")
    if acceptance == 1.0:
        return draft_len + 1.0
    return float((1.0 - acceptance ** (draft_len + 1)) / (1.0 - acceptance))


def acceptance_of(tau: float, draft_len: int) -> float:
    """The acceptance at which `draft_len` drafted tokens give `tau`; the inverse of `tau_of`."""
    if not 1.0 <= tau <= draft_len + 1:
        raise UsageError(f"tau must be from 1 to draft length + 1 = {draft_len + 1}, not {tau}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tau_of(middle, draft_len) < tau else (low, middle)
    return (low + high) / 2


def simple_speedup(tau: float, cost: float, draft_len: int) -> float:
    """τ / (1 + cK): verifying costs what one row costs."""
    return tau / (1.0 + cost * draft_len)


def break_even(draft_len: int, verify: Cost, draft: Cost, overhead: float = 0.0) -> float:
    """τ below which speculation slows down."""
    return verify(draft_len + 1) + draft(draft_len) + overhead


def speedup(tau: float, draft_len: int, verify: Cost, draft: Cost, overhead: float = 0.0) -> float:
    """τ / (v(K+1) + d(K) + o)."""
    return tau / break_even(draft_len, verify, draft, overhead)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A drafter as a user describes it: τ at draft length K, and c, the cost of one pass in target steps."""

    tau: float
    cost: float
    draft_len: int
    overhead: float = 0.0

    @classmethod
    def parse(cls, text: str) -> DraftPlan:
        """ "tau=3.2,c=0.07,k=5[,o=0.02]". Raises UsageError."""
        values: dict[str, float] = {}
        for part in text.split(","):
            key, _, value = part.partition("=")
            try:
                values[key.strip().lower()] = float(value)
            except ValueError:
                raise UsageError(f"--draft takes tau=…,c=…,k=…, not {text!r}") from None
        if not {"tau", "c", "k"} <= values.keys() <= {"tau", "c", "k", "o"}:
            raise UsageError(f"--draft takes tau=…,c=…,k=… and perhaps o=…, not {text!r}")
        draft_len = int(values["k"])
        if draft_len != values["k"] or not 1 <= draft_len <= 64:
            raise UsageError(f"--draft: k must be a whole number from 1 to 64, not {values['k']:g}")
        if not 0 <= values["c"] <= 100 or not 0 <= values.get("o", 0.0) <= 100:
            raise UsageError("--draft: c and o must be from 0 to 100")
        acceptance_of(values["tau"], draft_len)
        return cls(values["tau"], values["c"], draft_len, values.get("o", 0.0))

    def draft(self, draft_len: int) -> float:
        """d(K) = cK."""
        return self.cost * draft_len


ACCEPTANCES = (0.4, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """What a drafter brings: at its own K, at the best one, and over a table of K (rows) and τ shares."""

    speedup: float
    simple_speedup: float
    break_even_tau: float
    best_draft_len: int
    best_speedup: float
    table: tuple[tuple[int, float, float, float], ...]
    """(K, τ at the same acceptance, break-even τ, speed-up)."""
    grid: tuple[tuple[int, tuple[tuple[float, float], ...]], ...]
    """(K, (τ, speed-up) at each of ACCEPTANCES)."""


def report(plan: DraftPlan, verify: Cost, lengths: Sequence[int] = range(1, 17)) -> SpeculationReport:
    """Compare draft lengths at the acceptance that the plan's τ and K imply."""
    acceptance = acceptance_of(plan.tau, plan.draft_len)
    rows = []
    for length in lengths:
        tau = tau_of(acceptance, length)
        least = break_even(length, verify, plan.draft, plan.overhead)
        rows.append((length, tau, least, tau / least))
    best = max(rows, key=lambda row: row[3])
    grid = tuple(
        (length, tuple((tau_of(a, length), tau_of(a, length) / least) for a in ACCEPTANCES))
        for length, _, least, _ in rows
    )
    return SpeculationReport(
        speedup(plan.tau, plan.draft_len, verify, plan.draft, plan.overhead),
        simple_speedup(plan.tau, plan.cost, plan.draft_len),
        break_even(plan.draft_len, verify, plan.draft, plan.overhead),
        best[0],
        best[3],
        tuple(rows),
        grid,
    )
