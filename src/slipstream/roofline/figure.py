"""Figures as SVG: the waterfall as bars that add up, and the roofline with the measured point."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from slipstream.roofline.waterfall import Waterfall

WIDTH, ROW, TOP, LEFT, RIGHT = 920, 26, 64, 170, 150
ROOF_HEIGHT = 380
STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:13px;fill:#222}"
    ".title{font-size:17px;font-weight:600}.small{font-size:11px;fill:#666}"
    ".axis{stroke:#999;stroke-width:1}.grid{stroke:#e6e6e6;stroke-width:1}"
    ".ceiling{fill:#4a7ab5}.loss{fill:#d98650}.gain{fill:#5aa469}.unknown{fill:#b9b9b9}.total{fill:#333}"
)
HIDDEN = 0.002
"""Parts below this share of the time are left out of the picture."""


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """Where a step lies: operations per byte it needs, operations a second that it did; and the machine's roof."""

    intensity: float
    operations_per_second: float
    bandwidth: float
    peak: float


def draw(waterfall: Waterfall, title: str, point: RooflinePoint | None = None) -> str:
    """One SVG image: the waterfall, and the roofline below it if there is a point."""
    bars, height = _waterfall(waterfall)
    body = [f'<text class="title" x="16" y="28">{escape(title)}</text>']
    body.append(f'<text class="small" x="16" y="46">{escape(waterfall.verdict())}</text>')
    body += bars
    if point is not None:
        body.append(f'<g transform="translate(0,{height})">{"".join(_roofline(point))}</g>')
        height += ROOF_HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{height}" fill="#fff"/>{"".join(body)}</svg>\n'
    )


def _waterfall(waterfall: Waterfall) -> tuple[list[str], int]:
    shown = [p for p in waterfall.parts if abs(p.seconds) >= HIDDEN * waterfall.seconds]
    rest = waterfall.seconds - sum(p.seconds for p in shown)
    rows = [(p.name, p.seconds) for p in shown]
    if abs(rest) >= 1e-12:
        rows.append(("smaller parts", rest))
    reach = max(_reach(rows), waterfall.seconds)
    scale = (WIDTH - LEFT - RIGHT) / reach
    out: list[str] = []
    at = 0.0
    for index, (name, seconds) in enumerate(rows):
        y = TOP + index * ROW
        start = LEFT + scale * min(at, at + seconds)
        kind = _kind(name, seconds)
        out.append(f'<text x="{LEFT - 10}" y="{y + 17}" text-anchor="end">{escape(name)}</text>')
        out.append(
            f'<rect class="{kind}" x="{start:.1f}" y="{y + 4}" width="{max(abs(seconds) * scale, 0.5):.1f}" '
            f'height="{ROW - 8}" rx="2"/>'
        )
        out.append(_figure(start + abs(seconds) * scale, y, seconds, waterfall.seconds))
        at += seconds
    y = TOP + len(rows) * ROW
    out.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y + 1}" y2="{y + 1}"/>')
    out.append(f'<text x="{LEFT - 10}" y="{y + 18}" text-anchor="end" font-weight="600">what the user got</text>')
    width = f"{waterfall.seconds * scale:.1f}"
    out.append(f'<rect class="total" x="{LEFT}" y="{y + 5}" width="{width}" height="{ROW - 8}" rx="2"/>')
    text = f"{waterfall.seconds * 1e3:.2f} ms = {waterfall.tok_s:.1f} tokens/s"
    out.append(f'<text x="{LEFT + 8}" y="{y + 18}" style="fill:#fff">{text}</text>')
    return out, y + 2 * ROW


def _reach(rows: list[tuple[str, float]]) -> float:
    at = reach = 0.0
    for _, seconds in rows:
        at += seconds
        reach = max(reach, at)
    return reach


def _kind(name: str, seconds: float) -> str:
    if name == "ceiling":
        return "ceiling"
    if name in ("unexplained", "smaller parts"):
        return "unknown"
    return "loss" if seconds >= 0 else "gain"


def _figure(x: float, y: int, seconds: float, total: float) -> str:
    text = f"{seconds * 1e6:.0f} µs, {seconds / total:.1%}"
    return f'<text class="small" x="{x + 6:.1f}" y="{y + 17}">{text}</text>'


def _roofline(point: RooflinePoint) -> list[str]:
    """Log-log: operations a second against operations per byte."""
    left, right, top, bottom = LEFT, WIDTH - RIGHT, 46, ROOF_HEIGHT - 46
    ridge = point.peak / point.bandwidth
    xs = (
        math.floor(math.log10(min(point.intensity, ridge))) - 0.3,
        math.ceil(math.log10(max(point.intensity, ridge))) + 0.7,
    )
    floor = min(point.operations_per_second, point.bandwidth * 10 ** xs[0])
    ys = (math.log10(floor) - 0.2, math.log10(point.peak) + 0.35)

    def x(value: float) -> float:
        return left + (math.log10(value) - xs[0]) / (xs[1] - xs[0]) * (right - left)

    def y(value: float) -> float:
        return bottom - (math.log10(value) - ys[0]) / (ys[1] - ys[0]) * (bottom - top)

    out = ['<text class="title" x="16" y="24">roofline</text>']
    for power in range(math.ceil(xs[0]), math.floor(xs[1]) + 1):
        at = x(10**power)
        out.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>')
        out.append(f'<text class="small" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{10.0**power:g}</text>')
    for power in range(math.ceil(ys[0]), math.floor(ys[1]) + 1):
        at = y(10**power)
        out.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(
            f'<text class="small" x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{_operations(10.0**power)}</text>'
        )
    start, end = 10 ** xs[0], 10 ** xs[1]
    out.append(
        f'<polyline points="{x(start):.1f},{y(point.bandwidth * start):.1f} {x(ridge):.1f},{y(point.peak):.1f} '
        f'{x(end):.1f},{y(point.peak):.1f}" fill="none" stroke="#4a7ab5" stroke-width="2.5"/>'
    )
    peak, above = f"peak {_operations(point.peak)}", f"{y(point.peak) - 7:.1f}"
    out.append(f'<text class="small" x="{right}" y="{above}" text-anchor="end">{peak}</text>')
    roof = min(point.bandwidth * point.intensity, point.peak)
    px, measured = x(point.intensity), y(point.operations_per_second)
    ends = f'x1="{px:.1f}" x2="{px:.1f}" y1="{y(roof):.1f}" y2="{measured:.1f}"'
    out.append(f'<line {ends} stroke="#d98650" stroke-dasharray="3 3"/>')
    out.append(f'<circle class="ceiling" cx="{px:.1f}" cy="{y(roof):.1f}" r="5"/>')
    out.append(f'<circle class="loss" cx="{px:.1f}" cy="{measured:.1f}" r="5"/>')
    share = point.operations_per_second / roof
    out.append(f'<text x="{px + 10:.1f}" y="{measured + 14:.1f}">measured: {share:.0%} of the roof</text>')
    middle = (left + right) / 2
    out.append(
        f'<text class="small" x="{middle}" y="{bottom + 34}" text-anchor="middle">operations per byte read</text>'
    )
    out.append(f'<text class="small" x="{left}" y="{top - 8}" text-anchor="end">operations a second</text>')
    return out


def _operations(value: float) -> str:
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.3g}"
