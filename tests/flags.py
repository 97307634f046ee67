"""The page of commands, flags and variables, as the program has them. `python -m tests.flags > docs/flags.md` makes it.

What a variable means docs/install.md says; here it is found out which there are, so that none stays unsaid.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

from slipstream.cli.app import app
from slipstream.cli.commands import Group

ROOT = Path(__file__).parents[1]
OURS = "SLIPSTREAM_"
NAMED_SO = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
"""What a variable's name looks like."""
IN_THE_CORE = re.compile(r'getenv\("(\w+)"\)')
LOOKS = ("os.environ", "environ", "os.getenv", "getenv")
TO_BE_SET = re.compile(rf"\b({NAMED_SO.pattern})=")
"""How a message tells people to set one, which some library reads."""


def commands(command: click.Command | None = None, words: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """(words after `slipstream`, command), in the order of --help."""
    command = command or app
    if not isinstance(command, Group):
        yield " ".join(words), command
        return
    for name in command.list_commands(None):
        inner = command.get_command(None, name)
        assert inner is not None
        yield from commands(inner, (*words, name))


def flags(command: click.Command) -> list[click.Option]:
    """What begins with a dash, --help aside."""
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def page() -> str:
    """All of it as Markdown."""
    found = list(commands())
    lines = [
        "# Commands and flags", "",
        "Made by `python -m tests.flags` from the program; `slipstream COMMAND --help` says the same. A flag without a",
        "default is not set, or chooses by itself.", "",
        "| `slipstream` | |", "|---|---|",
    ]  # fmt: skip
    for name, command in found:
        first = (command.help or "").partition("\n\n")[0]
        lines.append(f"| [`{name}`](#{name.replace(' ', '-')}) | {_plain(first)} |")
    for name, command in found:
        usage = [f"slipstream {name}", *(_name(p) for p in command.params if isinstance(p, click.Argument)), "[FLAGS]"]
        lines += ["", f"## {name}", "", f"    {' '.join(usage)}", "", _plain(command.help or ""), ""]
        lines += ["| | default | |", "|---|---|---|", *(_row(parameter) for parameter in command.params)]
    lines += ["", "## Variables", "", "[What they mean](install.md#environment).", "", "| | named in |", "|---|---|"]
    for name, files in sorted(variables().items(), key=lambda found: (not found[0].startswith(OURS), found[0])):
        lines.append(f"| `{name}` | {', '.join(f'`{file}`' for file in files)} |")
    return "\n".join(lines) + "\n"


def _row(parameter: click.Parameter) -> str:
    cells = _name(parameter).replace("|", "\\|"), _default(parameter), _plain(getattr(parameter, "help", None) or "")
    return f"| `{cells[0]}` | {cells[1]} | {cells[2]} |"


def _name(parameter: click.Parameter) -> str:
    if not isinstance(parameter, click.Option):
        return parameter.metavar or str(parameter.name).upper()
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {parameter.metavar or parameter.type.name.upper()}"


def _default(parameter: click.Parameter) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.default, bool) or not isinstance(parameter.default, str | int | float | Path):
        return "on" if parameter.default is True else ""
    return f"`{parameter.default}`" if str(parameter.default) else ""


def _plain(text: str) -> str:
    """Text of --help as Markdown: only what stands between backticks means something there."""
    return re.sub(r"([\[\]|<*])", r"\\\1", text)


def variables() -> dict[str, list[str]]:
    """Environment variables that the code reads by name, the package's and the core's, and where."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for name in read_by(path.read_text()):
            found.setdefault(name, []).append(str(path.relative_to(ROOT / "src" / "slipstream")))
    for path in sorted((ROOT / "native" / "src").rglob("*.?pp")):
        for name in IN_THE_CORE.findall(path.read_text()):
            found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return found


def reached_from(module: str) -> dict[str, Path]:
    """The package's modules that one imports, at whatever depth and whenever, by name."""
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        at = ROOT / "src" / Path(*name.split("."))
        path = at / "__init__.py" if at.is_dir() else at.with_suffix(".py")
        if name not in found and name.partition(".")[0] == "slipstream" and path.exists():
            found[name] = path
            waiting += _imports(path.read_text())
    return found


def _imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def read_as_a_whole(source: str) -> bool:
    """Whether a file of Python looks at the environment otherwise than by a name."""
    tree = ast.parse(source)
    named = sum(_key(node) is not None and not isinstance(node, ast.keyword) for node in ast.walk(tree))
    looks = sum(isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in LOOKS for node in ast.walk(tree))
    return looks > named


def read_by(source: str) -> set[str]:
    """Variables that a file of Python reads, or tells people to set.

    Where it says a name for one, these are all constants that it could stand for.
    """
    tree = ast.parse(source)
    keys = [key for node in ast.walk(tree) if (key := _key(node)) is not None]
    known = {key.value for key in keys if isinstance(key, ast.Constant)}
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    if not all(isinstance(key, ast.Constant) for key in keys):
        known |= constants
    told = {match[1] for text in constants if isinstance(text, str) for match in TO_BE_SET.finditer(text)}
    return told | {name for name in known if isinstance(name, str) and NAMED_SO.fullmatch(name)}


def _key(node: ast.AST) -> ast.expr | None:
    """What is looked up in the environment."""

    def environment(value: ast.expr) -> bool:
        return ast.unparse(value) in ("os.environ", "environ")

    match node:
        case ast.Call(func=ast.Attribute(value=value, attr="get" | "pop" | "setdefault"), args=[key, *_]):
            return key if environment(value) else None
        case ast.Call(func=function, args=[key, *_]) if ast.unparse(function) in ("os.getenv", "getenv"):
            return key
        case ast.Subscript(value=value, slice=key):
            return key if environment(value) else None
        case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[value]):
            return key if environment(value) else None
        case ast.keyword(arg="envvar", value=key):
            return key
    return None


if __name__ == "__main__":
    print(page(), end="")
