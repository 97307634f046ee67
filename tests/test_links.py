"""Links between the repository's own pages lead somewhere, outside docs/ as well, where mkdocs does not look."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT)
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    ]
)
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and mkdocs make them."""
    text = FENCED.sub("", page.read_text())
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).lower()) for heading in HEADING.findall(text)]
    return {heading.replace(" ", "-") for heading in plain}


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere; those to other machines are not followed."""
    found = []
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link) or link.startswith("#slipstream."):  # made from docstrings: mkdocs looks
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(ROOT / page) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` title\n[a](#a-b-title) [b](none.md) [c](page.md#gone) [d](https://x.org/y)\n")
    assert broken(page) == ["none.md", "page.md#gone"]
