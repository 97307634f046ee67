"""Curves of a training as an SVG image: tau, acceptance by position, and loss, over tokens seen."""

from __future__ import annotations

from pathlib import Path

from slipstream.training.figures import HEIGHT, WIDTH, Line, image, lines
from slipstream.training.trainer import Curve


def write_curves(path: Path, curve: Curve) -> None:
    """Three charts side by side."""
    seen = [tokens / 1e6 for tokens in curve.tokens]
    positions = max(map(len, curve.acceptance), default=0)
    accepted = [
        Line(f"{at + 1}", [(x, row[at]) for x, row in zip(seen, curve.acceptance, strict=True) if at < len(row)])
        for at in range(positions)
    ]
    across = "million tokens of answers seen"
    charts = (
        lines("tau of held-out answers", across, [Line("", list(zip(seen, curve.tau, strict=True)))]),
        lines("acceptance by position", across, accepted),
        lines("loss", across, [Line("", list(zip(seen, curve.loss, strict=True)))]),
    )
    parts = [(WIDTH * index, 0.0, chart) for index, chart in enumerate(charts)]
    path.write_text(image(parts, WIDTH * len(charts), HEIGHT))
