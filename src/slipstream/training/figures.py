"""Figures as SVG: lines over an axis, and bars with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from slipstream.roofline.figure import STYLE

COLOURS = ("#4a7ab5", "#d98650", "#5aa469", "#8d6cab", "#c05a6e", "#7a7a7a", "#2f9e9e")
WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 56, 46
ROW, NAMES = 24, 190
HALO = 'paint-order="stroke" stroke="#fff" stroke-width="4"'
"""For figures that a line may cross."""


@dataclass(frozen=True, slots=True)
class Line:
    """A named line through points."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Bar:
    """A named bar with, perhaps, an interval."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


def image(parts: Sequence[tuple[float, float, str]], width: float, height: float) -> str:
    """One image of parts, each at its place (x, y)."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    body = "".join(f'<g transform="translate({x:g},{y:g})">{part}</g>' for x, y, part in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>'
        f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>{body}</svg>\n'
    )


def steps(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers that span a range."""
    span = max(high - low, 1e-9)
    unit = 10 ** math.floor(math.log10(span / most))
    step = next(unit * factor for factor in (1, 2, 5, 10, 20) if span / (unit * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    return [step * (first + i) for i in range(math.floor(high / step + 1e-9) - first + 1)]


def lines(title: str, across: str, drawn: Sequence[Line]) -> str:
    """A chart of lines; their names stand at their ends."""
    points = [point for line in drawn for point in line.points if math.isfinite(point[1])]
    if not points:
        return f'<text class="title" x="16" y="24">{escape(title)}</text>'
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = min(y for _, y in points), max(y for _, y in points)
    margin = 0.08 * max(y_high - y_low, 1e-6)
    y_low, y_high = y_low - margin, y_high + margin
    right, bottom = WIDTH - RIGHT - 40, HEIGHT - BOTTOM

    def x(value: float) -> float:
        return LEFT + (value - x_low) / max(x_high - x_low, 1e-9) * (right - LEFT)

    def y(value: float) -> float:
        return bottom - (value - y_low) / (y_high - y_low) * (bottom - TOP)

    out = [f'<text class="title" x="16" y="28">{escape(title)}</text>']
    for value in steps(y_low, y_high):
        out.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        out.append(f'<text class="small" x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in steps(x_low, x_high):
        out.append(f'<text class="small" x="{x(value):.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    out.append(
        f'<text class="small" x="{(LEFT + right) / 2}" y="{bottom + 34}" text-anchor="middle">{escape(across)}</text>'
    )
    labelled: list[float] = []
    for colour, line in zip(COLOURS * 9, drawn, strict=False):
        kept = [(x(a), y(b)) for a, b in line.points if math.isfinite(b)]
        if not kept:
            continue
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in kept)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at = kept[-1][1] + 4
        while any(abs(at - other) < 12 for other in labelled):
            at += 12 if at > sum(labelled) / len(labelled) else -12  # away from the others
        labelled.append(at)
        place = f'x="{kept[-1][0] + 5:.1f}" y="{at:.1f}"'
        out.append(f'<text class="small" {place} style="fill:{colour}">{escape(line.name)}</text>')
    return "".join(out)


def bars(
    title: str,
    drawn: Sequence[Bar],
    unit: str = "",
    mark: tuple[float, str] | None = None,
    reach: float = 0.0,
) -> tuple[str, float]:
    """A chart of bars, and its height; `mark` is a line across all of them with its meaning, and `reach` a value that
    there is room for in any case.
    """
    reach = max(
        [reach] + [bar.high if bar.high is not None else bar.value for bar in drawn] + ([mark[0]] if mark else [])
    )
    scale = (WIDTH - NAMES - 90) / max(reach, 1e-9)
    out = [f'<text class="title" x="16" y="28">{escape(title)}</text>']
    labels: list[str] = []
    for index, bar in enumerate(drawn):
        y = TOP + index * ROW
        colour = COLOURS[index % len(COLOURS)]
        out.append(f'<text x="{NAMES - 8}" y="{y + 16}" text-anchor="end">{escape(bar.name)}</text>')
        size = f'width="{max(bar.value * scale, 1):.1f}" height="{ROW - 7}"'
        out.append(f'<rect x="{NAMES}" y="{y + 3}" {size} rx="2" fill="{colour}"/>')
        end = bar.value
        if bar.low is not None and bar.high is not None:
            middle, end = y + ROW / 2 - 0.5, bar.high
            ends = f'x1="{NAMES + bar.low * scale:.1f}" x2="{NAMES + bar.high * scale:.1f}" y1="{middle}" y2="{middle}"'
            out.append(f'<line {ends} stroke="#222" stroke-width="1.5"/>')
        text = f"{bar.value:.3g}{unit}" if bar.value < 1000 else f"{bar.value:.0f}{unit}"
        labels.append(f'<text class="small" {HALO} x="{NAMES + end * scale + 6:.1f}" y="{y + 16}">{text}</text>')
    height = TOP + len(drawn) * ROW + 8
    if mark is not None:
        at = NAMES + mark[0] * scale
        out.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 4}" y2="{height - 6}" stroke="#888" stroke-dasharray="4 3"/>'
        )
        out.append(f'<text class="small" x="{at:.1f}" y="{TOP - 8}" text-anchor="middle">{escape(mark[1])}</text>')
    return "".join(out + labels), height
