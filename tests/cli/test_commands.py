"""Commands made of functions: every kind of parameter, and modules that load only when asked for."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from pathlib import Path
from typing import Annotated, Any

import click
import pytest

from slipstream import __version__
from slipstream.cli.commands import Argument, Group, Option, command
from slipstream.cli.options import table

given: dict[str, Any] = {}


def example(
    place: Annotated[str, Argument("PLACE", "Where.")],
    count: Annotated[int, Option("-c", "--how-many", help="Number.")],
    folder: Annotated[Path, Argument()] = Path("here"),
    share: Annotated[float | None, Option()] = None,
    words: Annotated[list[str], Option("--word")] = [],  # noqa: B006
    loud: Annotated[bool, Option("--loud")] = False,
    note: Annotated[str, Option()] = "",
) -> None:
    """Do something.

    More of it.
    """
    given.update(locals())


def run(*words: str) -> dict[str, Any]:
    given.clear()
    command(example, "example")(list(words), standalone_mode=False)
    return dict(given)


def test_every_kind_of_parameter() -> None:
    assert run("x", "-c", "3") == {
        "place": "x", "count": 3, "folder": Path("here"), "share": None, "words": [], "loud": False, "note": "",
    }  # fmt: skip
    words = ["y", "--how-many", "-1", "there", "--share", "0.5", "--word", "a", "--word", "b", "--loud", "--note", "n"]
    assert run(*words) == {
        "place": "y", "count": -1, "folder": Path("there"), "share": 0.5, "words": ["a", "b"], "loud": True,
        "note": "n",
    }  # fmt: skip


@pytest.mark.parametrize(
    "words", [["x"], ["-c", "3"], ["x", "-c", "three"], ["x", "-c", "3", "--shout"], ["x", "-c", "3", "a", "b"]]
)
def test_wrong_use(words: list[str]) -> None:
    with pytest.raises(click.UsageError):
        run(*words)
    assert given == {}


def test_help_says_what_is_wanted() -> None:
    text = command(example, "example").get_help(click.Context(command(example, "example")))
    assert "Do something.\n\n  More of it." in text
    assert "PLACE" in text
    assert "Where.  [required]" in text
    assert "-c, --how-many INTEGER" in text
    assert "--share FLOAT" in text
    assert '[default: ""]' not in text


def test_a_parameter_wants_a_marker() -> None:
    def unmarked(count: int) -> None: ...

    with pytest.raises(TypeError, match="count is neither"):
        command(unmarked, "unmarked")


def test_commands_load_when_asked_for() -> None:
    group = Group({"decode": "no.such.module:at_all", "inner": Group({}, "Inside.")}, "Outside.")
    assert group.list_commands(None) == ["decode", "inner"]
    assert isinstance(group.get_command(None, "inner"), Group)
    assert group.get_command(None, "other") is None
    with pytest.raises(ModuleNotFoundError):
        group.get_command(None, "decode")
    program = "import sys, slipstream.cli.app; print([n for n in sys.modules if n in ('numpy', 'slipstream.engine')])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    table("speeds", [("plain", "9.5", "a"), ("drafted", "110.25", "-")], ("", "tokens/s", "with"))
    assert capsys.readouterr().out.splitlines() == [
        "speeds",
        "         tokens/s  with",
        "-------  --------  ----",
        "plain         9.5  a",
        "drafted    110.25  -",
        "",
    ]


def test_a_bar_on_a_terminal_that_vanishes() -> None:
    program = (
        "from slipstream.cli.options import progress_bar\n"
        "with progress_bar() as bar:\n"
        "    for i in range(5): bar('packing', i + 1, 5)\n"
        "    bar('fitting', 1, 2)\n"
    )
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    subprocess.run([sys.executable, "-c", program], stderr=theirs, check=True)
    written = os.read(ours, 1 << 16).decode()
    os.close(theirs)
    os.close(ours)
    assert "packing" in written
    assert "fitting" in written
    assert "%" in written
    assert written.rstrip(" ").endswith("\r"), "nothing stays on the line"
    piped = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert piped.stderr == ""


def test_version_and_completion() -> None:
    command = [sys.executable, "-c", "from slipstream.cli import main; main()"]
    said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    assert said == f"slipstream, version {__version__}\n"
    asked = {"_SLIPSTREAM_COMPLETE": "bash_complete", "COMP_WORDS": "slipstream bench pre", "COMP_CWORD": "2"}
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | asked).stdout
    assert found == "plain,prefill\n"
