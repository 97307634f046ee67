"""A training: it learns, goes on where it was killed, comes to the same weights, and can be shared by processes."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slipstream.engine import Engine, LoadOptions, load_model
from slipstream.engine.drafters import Speculative, load_speculative
from slipstream.errors import UsageError
from slipstream.program import KVFormat
from slipstream.speculation.dspark_model import read_dspark
from slipstream.speculation.tapped import TappedDrafter
from slipstream.training.dataset import (
    FOREIGN,
    coverage,
    data_fingerprint,
    examples_of,
    in_order,
    split,
    told,
    vocabulary_of,
)
from slipstream.training.evaluate import leaks
from slipstream.training.features import FeatureSource
from slipstream.training.records import Record, target_of
from slipstream.training.replay import interval, replay, tau
from slipstream.training.resources import Meter
from slipstream.training.store import TrafficStore
from slipstream.training.trainer import Schedule
from slipstream.training.training import CARD, CHECKED, CURVES, TrainOptions, prepare, train
from slipstream.weights.open import open_checkpoint
from tests.conftest import write_tiny_gguf
from tests.engine.test_jitter import collect
from tests.speculation.test_state import loaded
from tests.training.conftest import greedy_records

SCHEDULE = Schedule(1, round_tokens=1024, batch_tokens=256, uses=2, learning_rate=3e-3, draft_len=4)
OPTIONS = TrainOptions(rounds=6, schedule=SCHEDULE, held_out=0.2, threads=1, max_len=128)


def trained(target: Path, traffic: Path, folder: Path, generic: Path | None = None, **changes: Any) -> dict[str, Any]:
    options = replace(OPTIONS, **changes)
    mixed: list[Record] = []
    if generic is not None:
        with TrafficStore(generic) as store:
            mixed = list(store.records())
    with TrafficStore(traffic) as store:
        prepared = prepare(str(target), store.records(), mixed, options)
    return train(prepared, options, folder)


def other_prompts(records: list[Record], path: Path) -> Path:
    """A traffic file of the same answers to prompts that nobody else has."""
    rng = random.Random(5)
    with TrafficStore(path) as store:
        store.add([replace(one, tokens=(*rng.choices(range(65, 90), k=9), *one.tokens[9:])) for one in records])
    return path


@pytest.mark.parametrize(
    ("kind", "layout", "vocabulary"),
    [
        ("eagle3", "eagle3", None),
        ("eagle3", "speculators", None),
        ("dspark", "speculators", None),
        ("dspark", "deepspec", 0),
    ],
)  # fmt: skip
def test_it_learns_and_what_it_wrote_drafts(
    kind: str,
    layout: Any,
    vocabulary: int | None,
    tiny_gguf: Path,
    tiny_traffic: Path,
    tiny_records: list[Record],
    tmp_path: Path,
) -> None:
    card = trained(
        tiny_gguf, tiny_traffic, tmp_path / "d", kind=kind, layout=layout, rounds=30, draft_vocabulary=vocabulary
    )
    curve = card["curve"]
    assert curve["tau"][-1] > curve["tau"][0] + 0.15
    assert curve["loss"][-1] < curve["loss"][1]
    assert card["tokens_seen"] > 0
    assert card["target_fingerprint"] == tiny_records[0].target
    assert (tmp_path / "d" / CURVES).read_text().startswith("<svg")
    assert json.loads((tmp_path / "d" / CARD).read_text())["answers"] == card["answers"]
    assert card["checked_answers"] == min(CHECKED, card["held_out_answers"]) > 0
    assert not list((tmp_path / "d").glob("*state*"))
    wanted = Speculative("folder", str(tmp_path / "d"), only=True)
    model, controller = load_speculative(str(tiny_gguf), LoadOptions(max_rows=64, threads=1), wanted)
    assert controller is not None
    drafter: Any = controller.neural
    examples, _ = examples_of(tiny_records[-12:], tiny_records[0].target, 128)
    source = FeatureSource(model, drafter.needs.taps)
    found = replay(drafter, examples, 4, source)
    assert len(found) == 12
    assert tau(found) == pytest.approx(curve["tau"][-1], rel=0.2)
    assert interval(found)[0] <= tau(found) <= interval(found)[1]
    assert leaks(drafter, examples, source, 4) == []


def test_a_leak_is_found(tiny_gguf: Path, tiny_records: list[Record], tmp_path: Path) -> None:
    """A source that hands out hidden states of tokens that are not known yet: taps off by two."""
    model, drafter = loaded("eagle3", tiny_gguf, tmp_path)
    assert isinstance(drafter, TappedDrafter)

    class Leaking(FeatureSource):
        def compute(self, sequences: Any) -> list[Any]:
            return [np.roll(states, -2, 0) for states in super().compute(sequences)]

    examples, _ = examples_of(tiny_records, tiny_records[0].target, 128)
    assert leaks(drafter, examples, Leaking(model, drafter.needs.taps), 4)


def test_taps_off_by_a_layer_cost_tokens(tmp_path: Path) -> None:
    """A drafter that is handed the hidden states of the layer before or after is lost even on what it has learned."""
    target, folder = tmp_path / "deep.gguf", tmp_path / "d"
    write_tiny_gguf(target, layers=8)
    records = greedy_records(target)
    with TrafficStore(tmp_path / "deep.db") as store:
        store.add(records)
    trained(target, tmp_path / "deep.db", folder, kind="eagle3", rounds=60)
    wanted = Speculative("folder", str(folder), only=True)
    _, controller = load_speculative(str(target), LoadOptions(max_rows=64, threads=1), wanted)
    assert controller is not None
    drafter: Any = controller.neural
    examples, _ = examples_of(records, records[0].target, 128)

    def reached(shift: int) -> float:
        taps = tuple(tap + shift for tap in drafter.needs.taps)
        model = load_model(str(target), LoadOptions(max_rows=64, threads=1, taps=taps))
        return tau(replay(drafter, examples, 4, FeatureSource(model, taps)))

    right = reached(0)
    assert right > 1.3
    assert max(reached(-1), reached(1)) < 1.0 + 0.85 * (right - 1.0)


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "layout", "taps"),
    [("eagle3", "eagle3", (0, 2)), ("eagle3", "eagle3", (2,)), ("eagle3", "speculators", (1,)),
     ("dspark", "deepspec", (0, 1))],
)  # fmt: skip
def test_taps_of_ones_own(
    kind: str, layout: Any, taps: tuple[int, ...], tiny_gguf: Path, tiny_traffic: Path, tmp_path: Path
) -> None:
    """What was trained with them is read back with them, and drafts as it did in training."""
    card = trained(tiny_gguf, tiny_traffic, tmp_path / "d", kind=kind, layout=layout, taps=taps, rounds=2)
    assert card["taps"] == list(taps)
    wanted = Speculative("folder", str(tmp_path / "d"), only=True)
    _, controller = load_speculative(str(tiny_gguf), LoadOptions(max_rows=64, threads=1), wanted)
    assert controller is not None
    drafter: Any = controller.neural
    assert drafter.needs.taps == taps
    for wrong in ((2, 1), (0, 9), (0, 0)):
        with pytest.raises(UsageError, match="--taps are rising numbers of layers, from 0 to 2"):
            trained(tiny_gguf, tiny_traffic, tmp_path / "w", kind=kind, layout=layout, taps=wrong)


@pytest.mark.parametrize("layers", [1, 3])
def test_layers_of_a_block_drafter(layers: int, tiny_gguf: Path, tiny_traffic: Path, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    trained(tiny_gguf, tiny_traffic, folder, kind="dspark", layout="speculators", layers=layers, rounds=1)
    checkpoint = open_checkpoint(folder)
    assert read_dspark(checkpoint, 2, 64).layers == layers
    assert sum(name.endswith("mlp.gate_proj.weight") for name in checkpoint.tensors) == layers
    wanted = Speculative("folder", str(folder), only=True)
    _, controller = load_speculative(str(tiny_gguf), LoadOptions(max_rows=64, threads=1), wanted)
    assert controller is not None


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_the_same_seed_gives_the_same_weights(kind: str, tiny_gguf: Path, tiny_traffic: Path, tmp_path: Path) -> None:
    layout: Any = "eagle3" if kind == "eagle3" else "speculators"
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        trained(
            tiny_gguf, tiny_traffic, tmp_path / name, kind=kind, layout=layout, rounds=3,
            schedule=replace(SCHEDULE, seed=seed),
        )  # fmt: skip
    first, again, other = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_nothing_held_out_is_learned_from(tiny_gguf: Path, tiny_records: list[Record]) -> None:
    """Also not where the other traffic that is mixed in holds it, or where answers have the same time."""
    prepared = prepare(str(tiny_gguf), tiny_records, tiny_records, OPTIONS)
    held = {example.prompt for example in prepared.own.held_out}
    assert prepared.generic
    assert not held & {example.prompt for example in (*prepared.own.train, *prepared.generic)}
    coarse = [replace(r, time=float(int(r.time) // 7 * 7)) for r in tiny_records]
    examples, _ = examples_of(coarse, coarse[0].target, 128)
    both = split(examples, 0.1)
    assert max(e.time for e in both.train) < min(e.time for e in both.held_out)
    with pytest.raises(UsageError, match="same time"):
        split([replace(e, time=5.0) for e in examples], 0.1)


def test_two_processes_learn_the_same(tiny_gguf: Path, tiny_traffic: Path, tmp_path: Path) -> None:
    alone = trained(tiny_gguf, tiny_traffic, tmp_path / "alone", rounds=4)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone",
        "-m", "slipstream", "drafter", "train", "--model", str(tiny_gguf), "--traffic", str(tiny_traffic), "--out",
        str(tmp_path / "both"), "--rounds", "4", "--batch-tokens", "256", "--learning-rate", "3e-3", "--max-len", "128",
        "--held-out", "0.2", "--threads", "1", "--round-tokens", "1024",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("sizes, as foreseen") == done.stdout.count("measure it: ") == 1, "the first one speaks"
    both = json.loads((tmp_path / "both" / CARD).read_text())
    assert both["curve"]["loss"][1:] == pytest.approx(alone["curve"]["loss"][1:], rel=0.02)


def test_a_budget_becomes_rounds(tiny_gguf: Path, tiny_traffic: Path, tmp_path: Path) -> None:
    few, more = (
        trained(tiny_gguf, tiny_traffic, tmp_path / str(seconds), rounds=None, seconds=seconds)
        for seconds in (1e-3, 6.0)
    )
    assert few["schedule"]["rounds"] == 2
    assert more["schedule"]["rounds"] > 2
    assert more["peak_memory_bytes"] > 0
    left = sum(file.stat().st_size for file in (tmp_path / "6.0").iterdir())
    assert left < more["peak_disk_bytes"] < 10 * left, "with the state that went on to be deleted"
    assert more["energy_joules"] is None or more["energy_joules"] > 0
    assert 1.0 <= more["speedup_estimate"] < 10


def test_energy_is_read_where_the_machine_tells(tmp_path: Path) -> None:
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (tmp_path / "intel-rapl:0:0").mkdir()
    (zone / "max_energy_range_uj").write_text("10000000\n")
    (zone / "energy_uj").write_text("9000000\n")
    meter = Meter(tmp_path)
    (zone / "energy_uj").write_text("1500000\n")  # the counter began anew
    assert meter.report()["energy_joules"] == pytest.approx(2.5)
    meter.go_on_from({"wall_seconds": 5.0, "cpu_seconds": 1e6, "peak_memory_bytes": 1 << 60, "energy_joules": 4.0})
    found = meter.report()
    assert found["energy_joules"] == pytest.approx(6.5)
    assert found["peak_memory_bytes"] == 1 << 60
    assert found["cpu_seconds"] > 1e6
    assert found["wall_seconds"] > 5.0
    assert found["peak_disk_bytes"] == 0
    meter.go_on_from({"energy_joules": None, "peak_disk_bytes": 4})  # as of another machine
    meter.look_at(zone)
    assert meter.report()["peak_disk_bytes"] == len("10000000\n1500000\n")
    (zone / "energy_uj").unlink()
    meter.look_at(zone)
    assert meter.report()["peak_disk_bytes"] == len("10000000\n1500000\n"), "the most that it ever held"
    assert meter.report()["energy_joules"] is None
    assert Meter(tmp_path / "nowhere").report()["energy_joules"] is None


def test_a_drafter_is_trained_on(tiny_gguf: Path, tiny_traffic: Path, tmp_path: Path) -> None:
    first = trained(tiny_gguf, tiny_traffic, tmp_path / "a", rounds=20)
    second = trained(tiny_gguf, tiny_traffic, tmp_path / "b", rounds=2, start_from=tmp_path / "a")
    assert second["curve"]["tau"][0] == pytest.approx(first["curve"]["tau"][-1], abs=0.1)
    with pytest.raises(UsageError, match="no dspark drafter"):
        trained(tiny_gguf, tiny_traffic, tmp_path / "c", kind="dspark", layout="speculators", start_from=tmp_path / "a")


def test_what_stands_for_the_unknown_stays_when_a_drafter_is_trained_on(
    tiny_gguf: Path, tiny_traffic: Path, tmp_path: Path
) -> None:
    """Its weights have learned what that token means; another one, which no new answer has, they would not know."""
    dspark: dict[str, Any] = {"kind": "dspark", "layout": "deepspec", "rounds": 2, "draft_vocabulary": 0}
    trained(tiny_gguf, tiny_traffic, tmp_path / "a", **dspark)
    path = tmp_path / "a" / "config.json"
    before = path.read_text()
    number = re.search(r'"mask_token_id": (\d+)', before)
    assert number is not None
    path.write_text(before.replace(number[0], '"mask_token_id": 5'))
    trained(tiny_gguf, tiny_traffic, tmp_path / "b", start_from=tmp_path / "a", **dspark)
    assert '"mask_token_id": 5' in (tmp_path / "b" / "config.json").read_text()


@pytest.mark.parametrize(
    ("recorded", "served", "said"),
    [
        ((KVFormat.INT8, "int4"), (KVFormat.BF16, "none"), "--kv-cache-dtype int8 --quantization int4"),
        ((KVFormat.BF16, "none"), (KVFormat.BF16, "int4"), "the precision of its file"),
    ],
)
def test_answers_of_other_precision_teach_nothing(
    recorded: tuple[KVFormat, Any], served: tuple[KVFormat, Any], said: str, tiny_gguf: Path, tiny_records: list[Record]
) -> None:
    """A target that is served otherwise gives other answers: which they are is recorded, and what to say is said."""
    plain = tiny_records[0].target
    others, mine = ([replace(one, target=target_of(plain, *how)) for one in tiny_records] for how in (recorded, served))
    options = replace(OPTIONS, kv_format=served[0], quantization=served[1])
    with pytest.raises(UsageError, match=f"60 are of this target served with {said}: say so, too"):
        prepare(str(tiny_gguf), others, [], options)
    with pytest.raises(UsageError, match=f"none of the generic records.* served with {said}"):
        prepare(str(tiny_gguf), mine, others, options)
    prepared = prepare(str(tiny_gguf), [*mine, *others[:7]], [], options)
    assert prepared.left_out[f"served with {said}"] == 7
    assert prepared.own == prepare(str(tiny_gguf), mine, [], options).own


def test_a_share_of_generic_answers_is_mixed_in(
    tiny_gguf: Path, tiny_traffic: Path, tiny_records: list[Record], tmp_path: Path
) -> None:
    """The card says so, and how many of them were left out and why."""
    with TrafficStore(other_prompts(tiny_records[:20], tmp_path / "g.db")) as store:
        generic = list(store.records())
    with TrafficStore(tiny_traffic) as store:
        prepared = prepare(str(tiny_gguf), store.records(), [*generic, replace(generic[0], target="x")], OPTIONS)
    assert len(prepared.generic) > 10
    cards = []
    for share in (0.0, 0.5):
        options = replace(OPTIONS, rounds=2, generic_share=share)
        cards.append(train(prepared, options, tmp_path / str(share)))
    assert cards[0]["generic_left_out"] == {FOREIGN: 1, "said before": 0, "too long": 0}
    assert cards[0]["generic_fingerprint"] == cards[1]["generic_fingerprint"] == data_fingerprint(prepared.generic)
    first, second = (load_file(next((tmp_path / share).glob("*.safetensors"))) for share in ("0.0", "0.5"))
    assert any(not torch.equal(first[name], second[name]) for name in first if first[name].is_floating_point())


def test_what_is_learned_from(tiny_records: list[Record]) -> None:
    target = tiny_records[0].target
    foreign = replace(tiny_records[0], target="another")
    examples, left_out = examples_of([*tiny_records, foreign, tiny_records[3]], target, 40)
    assert left_out == {FOREIGN: 1, "said before": 1, "too long": 0}
    assert "1 are of another target" in told(left_out)
    assert all(len(example.tokens) <= 40 for example in examples)
    both = split(examples, 0.2)
    assert [e.time for e in both.held_out] == sorted(e.time for e in examples)[-len(both.held_out) :]
    assert not {e.prompt for e in both.train} & {e.prompt for e in both.held_out}
    again = split([*examples, replace(examples[0], time=9e9)], 0.02)
    assert examples[0].prompt not in {e.prompt for e in again.train}
    with pytest.raises(UsageError, match="too few"):
        split(examples[:3], 0.1)
    tokens = vocabulary_of(both.train, 20, 259, [256])
    assert 256 in tokens
    assert len(tokens) == 20
    assert coverage(both.train, tokens) > 0.3
    assert coverage(both.train, np.arange(259, dtype=np.int32)) == 1.0
    assert data_fingerprint(both.train) != data_fingerprint(both.held_out)


def test_order_is_the_seeds_and_the_share_is_kept(tiny_records: list[Record]) -> None:
    examples, _ = examples_of(tiny_records, tiny_records[0].target, 128)
    own, generic = examples[:40], examples[40:]

    def first(seed: int, count: int) -> list[Any]:
        order = in_order(own, generic, 0.25, seed)
        return [next(order) for _ in range(count)]

    assert first(3, 200) == first(3, 200)
    assert first(3, 200) != first(4, 200)
    taken = first(3, 400)
    assert 60 < sum(e in generic for e in taken) < 140
    mine = [e for e in taken if e in own]
    assert {e.tokens for e in mine[:40]} == {e.tokens for e in own}  # a set through before any comes anew


def test_a_drafter_changes_no_answer(tiny_gguf: Path, tiny_traffic: Path, tmp_path: Path) -> None:
    trained(tiny_gguf, tiny_traffic, tmp_path / "d", rounds=10)
    from slipstream.program.sampling import SamplingParams
    from slipstream.speculation import Controller
    from tests.speculation.test_state import SLOW

    wanted = Speculative("folder", str(tmp_path / "d"), only=True)
    model, controller = load_speculative(str(tiny_gguf), LoadOptions(max_rows=64, threads=1), wanted)
    assert isinstance(controller, Controller)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = [[*b"abc def gh", n] for n in range(6)]
    plain = [collect(engine.run(engine.add(p, params)))[0].tokens for p in prompts for engine in [Engine(model)]]
    engine = Engine(model, SLOW, controller=controller, ahead=False)
    drafted = [collect(engine.run(engine.add(p, params)))[0].tokens for p in prompts]
    assert drafted == plain
    assert sum(c.accepted for c in controller.counts().values()) > 20


def test_the_card_says_nothing_of_what_was_said(tiny_gguf: Path, tiny_traffic: Path, tmp_path: Path) -> None:
    trained(tiny_gguf, tiny_traffic, tmp_path / "d")
    card = json.loads((tmp_path / "d" / CARD).read_text(), parse_constant=pytest.fail)
    curve = card.pop("curve")
    assert set(curve) == {"tokens", "seconds", "loss", "tau", "acceptance"}
    lists = {name: value for name, value in card.items() if isinstance(value, list)}
    assert lists.keys() == {"tags", "taps", "acceptance_by_position", "sizes"}
    tables = [value for value in card.values() if isinstance(value, dict)]
    assert not any(isinstance(value, list) for table in tables for value in table.values())
