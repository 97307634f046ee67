"""The page of flags is what the program has; flags and variables stay few, and every variable is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.flags import OURS, commands, flags, page, read_by, variables

DOCS = Path(__file__).parents[1] / "docs"
MOST_FLAGS, MOST_VARIABLES = 40, 10


def test_the_page_is_current() -> None:
    assert (DOCS / "flags.md").read_text() == page(), "run python -m tests.flags > docs/flags.md"


def test_serve_has_few_flags() -> None:
    assert 20 < len(flags(dict(commands())["serve"])) <= MOST_FLAGS


def test_few_variables_are_ours() -> None:
    ours = {name for name in variables() if name.startswith(OURS)}
    assert "SLIPSTREAM_HOME" in ours
    assert "SLIPSTREAM_ISA" in ours, "the core's"
    assert len(ours) <= MOST_VARIABLES


def test_every_variable_is_said() -> None:
    """Ours and others': each has a row that says what it means, and is on the page made from the program."""
    tables = [line.split("|")[1] for line in (DOCS / "install.md").read_text().splitlines() if line.startswith("| `")]
    said = {name for row in tables for name in re.findall(r"`(\w+)`", row)}
    assert {"HF_HUB_OFFLINE", "XDG_CACHE_HOME", "OTEL_EXPORTER_OTLP_ENDPOINT"} <= variables().keys()
    assert variables().keys() <= said
    made = page()
    assert all(f"| `{name}` |" in made for name in variables())


def test_every_json_is_described() -> None:
    described = (DOCS / "use.md").read_text()
    with_json = [name for name, command in commands() if any("--json" in flag.opts for flag in flags(command))]
    assert len(with_json) > 20
    assert [name for name in with_json if f"`{name} --json`" not in described] == []


@pytest.mark.parametrize(
    "source",
    ['os.environ["A_B"]', 'os.environ.get("A_B", "1")', 'os.getenv("A_B")', '"A_B" in os.environ',
     'Option(envvar="A_B")', 'error("set A_B=1 to go on")', 'NAME = "A_B"\ndef read(name):\n    os.getenv(name)',
     'NAMES = ("A_B",)\nany(os.environ.get(name) for name in NAMES)']
)  # fmt: skip
def test_a_variable_is_found_however_it_is_read(source: str) -> None:
    assert read_by(source) == {"A_B"}


def test_what_is_no_variable() -> None:
    assert read_by('SECRET = "A_B"\nos.sysconf("SC_PAGE_SIZE")\nos.environ.items()\n{}.get("C_D")') == set()
