"""Traffic of the tiny target: its own answers, some of them of another tag."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import pytest

from slipstream.engine import Engine, LoadOptions, load_model
from slipstream.models import read_config
from slipstream.program.sampling import SamplingParams
from slipstream.speculation.card import fingerprint_of
from slipstream.training.records import Record
from slipstream.training.store import TrafficStore
from slipstream.weights.open import open_checkpoint
from tests.conftest import write_tiny_gguf
from tests.engine.test_jitter import collect

ANSWERS, LENGTH = 60, 48


@pytest.fixture(scope="session")
def tiny_fingerprint(tiny_gguf: Path) -> str:
    return fingerprint(tiny_gguf)


@pytest.fixture(scope="session")
def tiny_floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with weights that can be quantised."""
    path = tmp_path_factory.mktemp("floats") / "tiny.gguf"
    write_tiny_gguf(path, kind=gguf.GGMLQuantizationType.BF16)
    return path


@pytest.fixture(scope="session")
def tiny_records(tiny_gguf: Path) -> list[Record]:
    return greedy_records(tiny_gguf)


def fingerprint(target: Path) -> str:
    checkpoint = open_checkpoint(target)
    return fingerprint_of(read_config(checkpoint), checkpoint)


def greedy_records(target: Path, beginning: bytes = b"") -> list[Record]:
    """Greedy answers to prompts of a few words; after what all begin with, if anything, none whose end was ignored."""
    model, rng = load_model(str(target), LoadOptions(max_rows=64, threads=1)), random.Random(0)
    engine, records = Engine(model), []
    while (number := len(records)) < ANSWERS:
        prompt = [*beginning, *(rng.choice(b"abcdefgh ") for _ in range(rng.randrange(6, 20)))]
        params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
        tokens = collect(engine.run(engine.add(prompt, params)))[0].tokens
        if beginning and model.eos & {*tokens}:
            continue
        span = (len(prompt), len(prompt) + len(tokens))
        records.append(
            Record(
                (*prompt, *tokens),
                (span,),
                fingerprint(target),
                "",
                f"tag{number % 2}",
                "",
                1000.0 + number,
                str(number),
                {"temperature": 0.0},
            )
        )
    return records


@pytest.fixture(scope="session")
def tiny_traffic(tiny_records: list[Record], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traffic") / "tiny.db"
    with TrafficStore(path) as store:
        store.add(tiny_records)
    return path
