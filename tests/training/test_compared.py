"""Evaluations of several kinds of traffic in one picture: the figures of all of them, on one scale."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from slipstream.errors import UsageError
from slipstream.training.compared import compared
from tests.cli.test_cli import run


def report(tag: str | None, tau: float, rate: float, ceiling: float | None = None) -> dict[str, Any]:
    served = {"plain": 100.0, "n-gram": 120.0, "mine & yours": rate, "mine & yours, 5 always": 999.0}
    return {
        "tag": tag,
        "traffic": "some.db",
        "draft_len": 5,
        "ceiling_tok_s": ceiling,
        "replayed": {
            "n-gram": {"": {"tau": 1.25, "interval": [1.2, 1.3]}},
            "mine & yours": {"": {"tau": tau, "interval": [tau - 0.1, tau + 0.1]}, "maths": {}},
        },
        "served": {"contenders": {name: {"tok_s": found} for name, found in served.items()}},
    }


def bars_of(svg: str) -> dict[float, list[float]]:
    """Widths of bars by the place of their chart."""
    found: dict[float, list[float]] = {}
    for x, y, chart in re.findall(r'<g transform="translate\(([\d.]+),([\d.]+)\)">(.*?)</g>', svg):
        found[float(y) + 1000 * float(x)] = [float(w) for w in re.findall(r'<rect [^>]*width="([\d.]+)"', chart)]
    return found


def test_all_figures_are_there_on_one_scale() -> None:
    svg = compared([report("maths", 3.5, 250.0, 400.0), report(None, 1.75, 1250.0)])
    said = [element.text for element in ElementTree.fromstring(svg).iter() if element.text]
    for text in ("maths: tau, K = 5", "some: tau, K = 5", "3.5", "1.75", "250", "1250", "ceiling of plain decoding"):
        assert said.count(text) == 1, text
    assert said.count("mine & yours") == 4
    assert not any("always" in text for text in said)
    first_tau, second_tau, first_rate, second_rate = (bars for _, bars in sorted(bars_of(svg).items()))
    assert first_tau[2] == pytest.approx(2 * second_tau[2], abs=0.2)
    assert second_rate[2] == pytest.approx(5 * first_rate[2], abs=0.5)
    assert len(first_tau) == len(first_rate) == 3


def test_only_evaluations_are_drawn(tmp_path: Path) -> None:
    good, other, damaged = tmp_path / "good.json", tmp_path / "other.json", tmp_path / "damaged.json"
    good.write_text(json.dumps(report("maths", 2.0, 200.0)))
    other.write_text(json.dumps({"served": {}}))
    damaged.write_text("{")
    out = ("--out", str(tmp_path / "a.svg"))
    drawn = run("drafter", "figure", *out, "--record", str(good), "--record", str(good))
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "a.svg").read_text().count("maths: tau") == 2
    for wrong in (other, damaged):
        refused = run("drafter", "figure", *out, "--record", str(good), "--record", str(wrong))
        assert (refused.returncode, "only what drafter eval" in refused.stderr) == (2, True), refused.stderr
    assert run("drafter", "figure", *out).returncode == 2
    with pytest.raises(UsageError, match="drafter eval"):
        compared([])
    with pytest.raises(UsageError, match="--serve-limit 0"):
        compared([report("maths", 2.0, 200.0) | {"served": None}])
