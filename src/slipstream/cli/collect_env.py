"""slipstream collect-env: what a report of a problem should say of the machine and the installation."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from pathlib import Path
from typing import Any

from slipstream.cli.options import JsonOption

SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
"""Variables with such a word in their name are said to be set, and no more."""
CGROUP = Path("/sys/fs/cgroup")


def collect_env(json_output: JsonOption = False) -> None:
    """Print versions, processor, memory, limits and settings: paste it into a report."""
    found = environment()
    if json_output:
        print(json.dumps(found))
        return
    for title, entries in found.items():
        print(f"{title}:")
        for name, value in entries.items():
            print(f"  {name}: {value}")


def environment() -> dict[str, dict[str, Any]]:
    """Keys: slipstream, machine, limits, packages, variables."""
    from slipstream import __version__
    from slipstream.bench.machine import machine
    from slipstream.kernels.native import _native

    folder = Path(__file__).resolve().parents[1]
    return {
        "slipstream": {"version": __version__, "native": Path(_native.__file__).name, "free disk": _free(folder)},
        "machine": machine() | {"memory": _memory()},
        "limits": _limits(),
        "packages": _packages(),
        "variables": _variables(),
    }


def _free(path: Path) -> str:
    return f"{shutil.disk_usage(path).free / 1e9:.1f} GB"


def _memory() -> str:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{pages / 1e9:.1f} GB"


def _limits() -> dict[str, str]:
    """What a container allows, as far as it can be read."""
    limits = {"cores this process may use": str(len(os.sched_getaffinity(0)))}
    for name in ("memory.max", "cpu.max"):
        try:
            limits[f"cgroup {name}"] = (CGROUP / name).read_text().strip()
        except OSError:
            continue
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if pages.exists():
        limits["huge pages"] = pages.read_text().strip()
    return limits


def _packages() -> dict[str, str]:
    """Versions of what is required, and of the extras that are installed."""
    found = {}
    for requirement in importlib.metadata.requires("slipstream") or ():
        name = requirement.split(";")[0].strip()
        name = next((name[:at] for at, c in enumerate(name) if not (c.isalnum() or c in "-_.")), name)
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if "extra" not in requirement:
                found[name] = "missing"
    return dict(sorted(found.items()))


def _variables() -> dict[str, str]:
    wanted = {name: value for name, value in os.environ.items() if name.startswith(("SLIPSTREAM_", "OMP_", "HF_"))}
    return {
        name: "(set)" if any(word in name for word in SECRET) else value for name, value in sorted(wanted.items())
    }  # fmt: skip
