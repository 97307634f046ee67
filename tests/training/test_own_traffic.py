"""A drafter of one's own traffic beats all others on it; when the traffic changes, a new training makes up for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.engine import Engine, LoadOptions, load_model
from slipstream.program.sampling import SamplingParams
from slipstream.training.contest import contest, held_out_of
from slipstream.training.records import Record
from slipstream.training.store import TrafficStore
from slipstream.training.trainer import Schedule
from slipstream.training.training import TrainOptions, prepare, train
from tests.conftest import write_tiny_gguf
from tests.training.conftest import fingerprint

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

ANSWERS, LENGTH, DRAFTED = 1000, 32, 4
TEMPERATURE = 0.6
"""Of answers that do not repeat one another word for word."""
HIDDEN = 192
"""Wide enough that a drafter in int4 is not far from what was trained."""
SCHEDULE = Schedule(1, round_tokens=4096, batch_tokens=512, uses=2, learning_rate=3e-3, draft_len=DRAFTED)
OPTIONS = TrainOptions(rounds=50, schedule=SCHEDULE, held_out=0.2, threads=2, max_len=128)


class Worlds:
    """A random target, and its traffic in two worlds that share no letter."""

    def __init__(self, folder: Path):
        self.folder, self.target = folder, folder / "tiny.gguf"
        write_tiny_gguf(self.target, hidden=HIDDEN)
        for seed, (name, letters) in enumerate({"own": b"abcdefgh ", "foreign": b"ABCDEFGH0123"}.items()):
            with TrafficStore(folder / f"{name}.db") as store:
                store.add(list(self._answers(letters, seed)))

    def _answers(self, letters: bytes, seed: int) -> Iterator[Record]:
        engine, rng = Engine(load_model(str(self.target), LoadOptions(max_rows=64))), random.Random(seed)
        origin, prompts, said = fingerprint(self.target), dict[int, list[int]](), dict[int, list[int]]()
        for number in range(ANSWERS):
            prompt = [rng.choice(letters) for _ in range(rng.randrange(6, 20))]
            params = SamplingParams(temperature=TEMPERATURE, max_tokens=LENGTH, ignore_eos=True, seed=number)
            prompts[engine.add(prompt, params)] = prompt
        while engine.busy:
            for chunk in engine.step():
                said.setdefault(chunk.request, []).extend(chunk.token_ids)
        for number, prompt in prompts.items():
            tokens = (*prompt, *said[number])
            span, settings = (len(prompt), len(tokens)), {"temperature": TEMPERATURE}
            yield Record(tokens, (span,), origin, "", "", "", 1000.0 + number, str(number), settings)

    def train(self, world: str, name: str, start_from: str | None = None) -> None:
        """A drafter of a world's traffic, perhaps from another one."""
        options = OPTIONS if start_from is None else _beginning_with(self.folder / start_from)
        with TrafficStore(self.folder / f"{world}.db") as store:
            train(prepare(str(self.target), store.records(), [], options), options, self.folder / name)

    def measure(self, world: str, *names: str) -> dict[str, tuple[float, float, float]]:
        """Tau of drafters, n-gram and suffix on a world's held-out answers, and between what it is in all likelihood.

        The first one has held them out.
        """
        first, *others = (self.folder / name for name in names)
        held = held_out_of(self.folder / f"{world}.db", first, [], None, everything=False)
        options = LoadOptions(max_rows=64)
        report = contest(str(self.target), held, [first, *others], 400, 2, DRAFTED, options, lambda *args: None)
        assert report["leaks"] == []
        assert report["served"]["identical"]
        return {name: (entry[""]["tau"], *entry[""]["interval"]) for name, entry in report["replayed"].items()}


def _beginning_with(folder: Path) -> TrainOptions:
    return replace(OPTIONS, start_from=folder)


def test_own_traffic_wins_and_a_change_of_traffic_is_made_up_for(tmp_path: Path) -> None:
    worlds = Worlds(tmp_path)
    worlds.train("own", "own")
    worlds.train("foreign", "generic")
    found = worlds.measure("own", "own", "generic")
    _, low, _ = found.pop("own")
    assert found.keys() == {"generic", "suffix", "n-gram"}
    for name, (_, _, high) in found.items():
        assert low > high, f"{name}: {found}"
    at_home = worlds.measure("foreign", "generic")["generic"][0]
    abroad = found["generic"][0]
    assert abroad < 0.9 * at_home, "the traffic has changed"
    worlds.train("own", "again", start_from="generic")
    again = worlds.measure("own", "again", "own")
    assert again["again"][1] > found["generic"][2], "and a new training has made up for it"
    assert again["again"][0] > 0.97 * again["own"][0], "as if it had been of this traffic from the beginning"
