"""Precision: what is learned from are the numbers of the target as it is served, its cache's and its weights'."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.engine import LoadOptions, load_model
from slipstream.errors import UsageError
from slipstream.kernels.native.packing import Quantization
from slipstream.program import KVFormat
from slipstream.training import training
from slipstream.training.features import FeatureSource
from slipstream.training.records import Record, target_of
from slipstream.training.sizing import BYTES_A_WEIGHT
from slipstream.training.store import TrafficStore
from slipstream.training.target import bytes_served
from slipstream.training.training import prepare
from tests.training.conftest import greedy_records
from tests.training.test_training import OPTIONS, trained


def test_what_is_learned_from_are_the_numbers_of_serving(
    tiny_floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the cache and the weights as they are served: hidden states are those, and no others."""
    traffic = traffic_of(greedy_records(tiny_floats), tmp_path / "t.db", KVFormat.INT8, "int8")
    seen: list[tuple[Any, Any, tuple[int, ...]]] = []
    compute = FeatureSource.compute

    def watched(self: FeatureSource, sequences: Any) -> Any:
        found = compute(self, sequences)
        seen.append((sequences, found, self.layers))
        return found

    monkeypatch.setattr(FeatureSource, "compute", watched)
    served: dict[str, Any] = {"kv_format": KVFormat.INT8, "quantization": "int8"}
    card = trained(tiny_floats, traffic, tmp_path / "d", rounds=1, **served)
    monkeypatch.undo()
    assert (card["kv_cache_dtype"], card["quantization"]) == ("int8", "int8")
    sequences, found, layers = seen[0]

    def same(options: LoadOptions) -> bool:
        model = load_model(str(tiny_floats), replace(options, threads=1, taps=layers))
        return all(map(np.array_equal, FeatureSource(model, layers).compute(sequences), found))

    assert same(LoadOptions(**served))
    assert not same(LoadOptions(kv_format=KVFormat.INT8))
    assert not same(LoadOptions(quantization="int8"))
    with TrafficStore(traffic) as store:
        prepared = prepare(str(tiny_floats), store.records(), [], replace(OPTIONS, **served))
    held = bytes_served(prepared.parts.config, prepared.checkpoint, "int8")
    assert card["share_of_the_targets_bytes"] == pytest.approx(BYTES_A_WEIGHT * card["parameters"] / held)
    model = load_model(str(tiny_floats), LoadOptions(quantization="int8"))
    assert held == pytest.approx(model.executable.weight_bytes, rel=0.02)


def traffic_of(records: list[Record], path: Path, kv_format: KVFormat, quantization: Quantization) -> Path:
    """A traffic file of answers of a target that is served so."""
    with TrafficStore(path) as store:
        store.add([replace(one, target=target_of(one.target, kv_format, quantization)) for one in records])
    return path


def test_a_training_for_other_numbers_is_another_one(
    tiny_gguf: Path, tiny_traffic: Path, tiny_records: list[Record], tmp_path: Path
) -> None:
    (tmp_path / "d").mkdir()
    with TrafficStore(tiny_traffic) as store:
        prepared = prepare(str(tiny_gguf), store.records(), [], OPTIONS)
    stopped = training._parts(prepared, OPTIONS) | {"seconds": 1200.0, "rounds": 6, "planned": 6, "until": 0.0}
    (tmp_path / "d" / "plan.json").write_text(json.dumps(stopped))
    for kv_format, quantization, other in ((KVFormat.INT8, "none", "cache"), (KVFormat.BF16, "int4", "weights")):
        traffic = traffic_of(tiny_records, tmp_path / f"{other}.db", kv_format, quantization)
        with pytest.raises(UsageError, match=f"another training was stopped in .*, with other {other}: "):
            trained(tiny_gguf, traffic, tmp_path / "d", kv_format=kv_format, quantization=quantization)
    assert trained(tiny_gguf, tiny_traffic, tmp_path / "d")["schedule"]["rounds"] == 6
