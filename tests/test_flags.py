"""The page of flags is what the program has; flags and variables stay few, and every variable is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.flags import OURS, ROOT, commands, flags, page, reached_from, read_as_a_whole, read_by, variables

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


LIBRARIES = {"HF_HOME", "HF_TOKEN"}
"""Said for people's sake; only a library reads them."""


def said() -> dict[str, str]:
    """Every variable that docs/install.md has a row for, and which commands read it."""
    tables = (DOCS / "install.md").read_text().partition("## Environment")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in tables.splitlines() if line.startswith("| `")]
    return {name: readers for names, readers in rows for name in re.findall(r"`([\w*]+)`", names)}


def test_every_variable_is_said() -> None:
    """Ours and others': each has a row that says what it means, and is on the page made from the program."""
    assert {"HF_HUB_OFFLINE", "XDG_CACHE_HOME", "OTEL_EXPORTER_OTLP_ENDPOINT"} <= variables().keys()
    assert said().keys() == variables().keys() | LIBRARIES | {"PIP_*"}
    made = page()
    assert all(f"| `{name}` |" in made for name in variables())


def test_serve_reads_few_variables() -> None:
    """What it could read, by what it imports, and what is said of it, are the same; the core's are with it."""
    reached = reached_from("slipstream.cli.serve")
    assert {"slipstream.engine.worker", "slipstream.kernels.native.executable"} <= reached.keys()
    read = {name for path in reached.values() for name in read_by(path.read_text())}
    read |= {name for name, files in variables().items() if any(file.startswith("native/") for file in files)}
    assert read == {name for name, readers in said().items() if "`serve`" in readers or "all commands" in readers}
    assert len(read) <= MOST_VARIABLES


def test_nobody_reads_variables_unnamed() -> None:
    """But for pip's, which have a prefix; what is only shown; and what is passed on."""
    files = {path.relative_to(ROOT / "src" / "slipstream") for path in (ROOT / "src").rglob("*.py")
             if read_as_a_whole(path.read_text())}  # fmt: skip
    assert {str(file) for file in files} == {"weights/wheels.py", "cli/collect_env.py", "bench/start.py"}
    assert read_as_a_whole("for name in os.environ:\n    os.getenv('A_B')")
    assert not read_as_a_whole("os.environ['A_B']; os.getenv('A_B')")


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
