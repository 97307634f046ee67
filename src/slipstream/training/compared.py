"""Compared: evaluations on several kinds of traffic in one picture, tau and tokens a second of each way of drafting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from slipstream.errors import UsageError
from slipstream.training.figures import WIDTH, Bar, bars, image

GAP = 8
"""Between one kind of traffic and the next."""


def compared(reports: Sequence[dict[str, Any]]) -> str:
    """One row of charts for each report, all on the same scales. Raises UsageError for what is no evaluation."""
    if any(report.get("served", ...) is None for report in reports):
        raise UsageError("an evaluation with --serve-limit 0 has no tokens a second to draw; measure it without")
    try:
        drawn = [(_taus(report), _rates(report)) for report in reports]
        tau_reach = max(bar.high or bar.value for taus, _ in drawn for bar in taus)
        rate_reach = max(max(report["ceiling_tok_s"] or 0.0, *(b.value for b in rates))
                         for report, (_, rates) in zip(reports, drawn, strict=True))  # fmt: skip
        parts: list[tuple[float, float, str]] = []
        y = 0.0
        for report, (taus, rates) in zip(reports, drawn, strict=True):
            name, ceiling = _traffic(report), report["ceiling_tok_s"]
            left, first = bars(f"{name}: tau, K = {report['draft_len']}", taus, reach=tau_reach)
            mark = (ceiling, "ceiling of plain decoding") if ceiling else None
            right, second = bars("tokens a second, one user", rates, mark=mark, reach=rate_reach)
            parts += [(0.0, y, left), (WIDTH, y, right)]
            y += max(first, second) + GAP
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError("only what drafter eval --out wrote can be drawn") from error
    return image(parts, 2 * WIDTH, y)


def _taus(report: dict[str, Any]) -> list[Bar]:
    """Plain decoding first, in the place and colour that it has among rates."""
    replayed = report["replayed"].items()
    return [Bar("plain", 1.0), *(Bar(name, entry[""]["tau"], *entry[""]["interval"]) for name, entry in replayed)]


def _rates(report: dict[str, Any]) -> list[Bar]:
    """Of the same ones: how a drafter does that drafts always is not what it is used for."""
    served = report["served"]["contenders"]
    return [Bar(name, served[name]["tok_s"]) for name in ("plain", *report["replayed"])]


def _traffic(report: dict[str, Any]) -> str:
    return str(report["tag"] or PurePath(report["traffic"]).stem)
