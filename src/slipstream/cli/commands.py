"""Commands from functions: what annotates a parameter says how the command line gives it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import click


@dataclass(frozen=True, init=False, slots=True)
class Option:
    """`Annotated[int, Option("-n", "--number", help="…")]`; without flags, the parameter's name is the flag."""

    flags: tuple[str, ...]
    help: str

    def __init__(self, *flags: str, help: str = "") -> None:
        object.__setattr__(self, "flags", flags)
        object.__setattr__(self, "help", help)


@dataclass(frozen=True, slots=True)
class Argument:
    """`Annotated[str, Argument(metavar="MODEL", help="…")]`; one with a default may be left out."""

    metavar: str | None = None
    help: str = ""


class _Argument(click.Argument):
    help: str

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.human_readable_name, f"{self.help}  [required]" if self.required else self.help


class _Command(click.Command):
    """Explains its arguments above its options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, kind in (("Arguments", click.Argument), ("Options", click.Option)):
            found = [p.get_help_record(ctx) for p in self.get_params(ctx) if isinstance(p, kind)]
            if records := [record for record in found if record is not None]:
                with formatter.section(title):
                    formatter.write_dl(records)


class Group(click.Group):
    """Commands under their names, imported when asked for: `{"decode": "package.module:function", …}`."""

    def __init__(self, places: Mapping[str, str | Group], help: str, name: str | None = None) -> None:
        super().__init__(name, help=help, no_args_is_help=True)
        self._places = places

    def list_commands(self, ctx: click.Context | None) -> list[str]:
        """In the order of the table."""
        return list(self._places)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        """None if there is no such command."""
        place = self._places.get(cmd_name)
        if place is None or isinstance(place, Group):
            return place
        module, _, function = place.partition(":")
        return command(getattr(import_module(module), function), cmd_name)


def command(function: Callable[..., None], name: str) -> click.Command:
    """A command that calls `function`; its docstring is the help. Raises TypeError for a parameter without a marker."""
    hints = get_type_hints(function, include_extras=True)
    parameters = [_parameter(p, hints[p.name]) for p in inspect.signature(function).parameters.values()]
    several = {p.name for p in parameters if isinstance(p, click.Option) and p.multiple}

    def run(**given: Any) -> None:
        function(**{key: list(value) if key in several else value for key, value in given.items()})

    return _Command(name, params=parameters, callback=run, help=inspect.getdoc(function))


def _parameter(parameter: inspect.Parameter, hint: Any) -> click.Parameter:
    kind, marker = get_args(hint) if get_origin(hint) is Annotated else (hint, None)
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (inner for inner in get_args(kind) if inner is not NoneType)
    several = get_origin(kind) is list
    if several:
        (kind,) = get_args(kind)
    required = parameter.default is inspect.Parameter.empty
    more: dict[str, Any] = {} if required else {"default": parameter.default}
    if kind is Path:
        kind = click.Path(path_type=Path)
    if isinstance(marker, Argument):
        argument = _Argument([parameter.name], required, type=kind, metavar=marker.metavar, **more)
        argument.help = marker.help
        return argument
    if not isinstance(marker, Option):
        raise TypeError(f"{parameter.name} is neither Option nor Argument")
    flags = marker.flags or ("--" + parameter.name.replace("_", "-"),)
    if kind is bool:
        return click.Option([*flags, parameter.name], is_flag=True, help=marker.help, **more)
    return click.Option(
        [*flags, parameter.name],
        type=kind, multiple=several, required=required, show_default=parameter.default != "", help=marker.help, **more,
    )  # fmt: skip
