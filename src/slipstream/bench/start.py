"""Start: seconds from process start to the first token, and peak memory, of fresh processes in turns."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.bench.machine import spread
from slipstream.errors import SlipstreamError
from slipstream.paths import models_folder

Progress = Callable[[int, int], None]
PROMPT = "The sky is"


class Start(NamedTuple):
    """One process: seconds to its first output, and the most memory it held (mapped pages included)."""

    seconds: float
    peak_bytes: int


def start_once(model: str, options: list[str], environment: dict[str, str]) -> Start:
    """Start `slipstream generate` and stop it once it has written a few tokens."""
    command = [sys.executable, "-m", "slipstream", "generate", model, "-p", PROMPT]
    command += ["--max-tokens", "1000", "--ignore-eos", "--seed", "1", *options]
    begun = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment)
        assert process.stdout is not None
        try:
            first = process.stdout.read(1)
            seconds = time.perf_counter() - begun
            process.stdout.read(16)
            peak = _peak_bytes(process.pid)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if not first:
            errors.seek(0)
            raise SlipstreamError(errors.read().decode(errors="replace").strip() or "the process wrote nothing")
    return Start(seconds, peak)


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def measure(model: str, options: list[str], turns: int, progress: Progress | None = None) -> dict[str, Any]:
    """One first start (nothing packed, no tokenizer built), then `turns` later ones.

    Keys: first_start, later_starts (seconds, peak_bytes), spread. The caches lie in a folder of their own, so
    that the user's are left alone; models are taken from where they are.
    """
    with tempfile.TemporaryDirectory() as home:
        folder = models_folder()
        environment = dict(os.environ) | {"SLIPSTREAM_HOME": home}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what pip installs has its bytecode
        if folder.is_dir():
            target = Path(home) / "data"
            target.mkdir()
            (target / "models").symlink_to(folder)
        first = start_once(model, options, environment)
        later = []
        for turn in range(turns):
            later.append(start_once(model, options, environment))
            if progress:
                progress(turn + 1, turns)
    return {
        "model": model,
        "turns": turns,
        "first_start": {"seconds": first.seconds, "peak_bytes": first.peak_bytes},
        "later_starts": {
            "seconds": spread([start.seconds for start in later])["median"],
            "peak_bytes": max(start.peak_bytes for start in later),
        },
        "spread": {"seconds": spread([start.seconds for start in later])},
    }
