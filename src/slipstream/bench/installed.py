"""Installed size: bytes and packages of this installation without extras, as the package metadata lists them."""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import slipstream


def closure(name: str = "slipstream") -> dict[str, Distribution]:
    """The package and all that it needs, by canonical name; what is installed beside them for others is left out.

    Raises PackageNotFoundError if something needed is missing.
    """
    found: dict[str, Distribution] = {}
    waiting: list[tuple[str, frozenset[str]]] = [(name, frozenset())]
    seen = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found[canonicalize_name(name)] = package = distribution(name)
        for line in package.requires or ():
            needed = Requirement(line)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                waiting.append((needed.name, frozenset(needed.extras)))
    return found


def files_of(package: Distribution) -> set[Path]:
    """Paths of the files that were installed, and of their bytecode for this Python."""
    listed = {Path(str(package.locate_file(file))).resolve() for file in package.files or ()}
    if package.metadata["Name"] == "slipstream":  # an editable installation lists only a pointer to its files
        listed |= {file.resolve() for folder in slipstream.__path__ for file in Path(folder).rglob("*")}
    code = f".{sys.implementation.cache_tag}.pyc"
    bytecode = {file.parent / "__pycache__" / (file.stem + code) for file in listed if file.suffix == ".py"}
    return {file for file in listed if file.is_file() and file.suffix != ".pyc"} | {
        file for file in bytecode if file.is_file()
    }


def installed() -> dict[str, Any]:
    """Keys: packages, bytes, bytecode_bytes (of these), by_package (bytes). Zeros if nothing is known of a package."""
    try:
        packages = closure()
    except PackageNotFoundError:  # run from its sources, on a Python that was given the rest by hand
        return {"packages": 0, "bytes": 0, "bytecode_bytes": 0, "by_package": {}}
    files = {name: files_of(package) for name, package in packages.items()}
    sizes = {name: sum(file.stat().st_size for file in listed) for name, listed in files.items()}
    every = set().union(*files.values())
    return {
        "packages": len(packages),
        "bytes": sum(sizes.values()),
        "bytecode_bytes": sum(file.stat().st_size for file in every if file.suffix == ".pyc"),
        "by_package": dict(sorted(sizes.items(), key=lambda item: -item[1])),
    }
