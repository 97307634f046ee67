"""Mutants of a good model file, read in a process of their own that is given little memory."""

from __future__ import annotations

import mmap
import multiprocessing
import random
import resource
import struct
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from slipstream.errors import ModelFileError
from slipstream.weights.store import Checkpoint

ROOM = 32 << 20
"""Bytes that reading all mutants may take on top of what the process has before."""


def mutate(raw: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, numbers made extreme, a piece cut out, doubled or truncated."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data)) if data else 0
        match rng.randrange(6):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                extreme = rng.choice([0, 1, 1 << 31, 1 << 32, 1 << 40, 1 << 63, (1 << 64) - 1])
                data[at : at + 8] = struct.pack("<Q", extreme)
            case 2:
                data[at : at + 4] = struct.pack("<I", rng.choice([0, 8, 9, 10, 13, 1 << 31]))
            case 3:
                del data[at : at + rng.randint(1, 40)]
            case 4:
                data[at:at] = data[at : at + rng.randint(1, 40)]
            case 5:
                del data[len(data) - rng.randint(0, len(data) // 2) :]
    return bytes(data)


def fuzz(
    read: Callable[[Path], Checkpoint], file: Path, base: bytes, cases: int, seed: int, opened: Path | None = None
) -> dict[str, int]:
    """Every mutant of `base` is read whole or refused with a ModelFileError that names what was `opened`."""
    # A fresh process: what others freed before is no room that could be filled unseen.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        outcomes = process.submit(_outcomes, read, file, base, cases, seed, opened or file).result()
    assert sum(outcomes.values()) == cases
    return outcomes


def _outcomes(
    read: Callable[[Path], Checkpoint], file: Path, base: bytes, cases: int, seed: int, opened: Path
) -> dict[str, int]:
    rng, outcomes = random.Random(seed), {"read": 0, "refused": 0}
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))  # past it is a MemoryError
    for _ in range(cases):
        file.write_bytes(mutate(base, rng))
        try:
            for tensor in read(opened).tensors.values():
                with np.errstate(all="ignore"):
                    tensor.float32()
            outcomes["read"] += 1
        except ModelFileError as error:
            outcomes["refused"] += str(opened) in str(error)
    return outcomes
