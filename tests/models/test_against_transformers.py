"""Every architecture's program on the reference backend against transformers in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.kernels.reference import ReferenceBackend
from slipstream.models import ModelConfig, read_config, record_program
from slipstream.models.rope import RopeConfig
from slipstream.models.weights import ModelWeights
from slipstream.program import KVFormat
from slipstream.weights.safetensors import read_safetensors
from tests import tiny
from tests.stepping import run_alone

TOKENS = [int(t) for t in np.random.default_rng(1).integers(0, 199, 90)]


def reference_logits(folder: Path, config: ModelConfig, chunk: int = 1 << 30) -> np.ndarray:
    weights = ModelWeights(config, read_safetensors(folder))
    program = record_program(config, kv_format=KVFormat.F32)
    return run_alone(ReferenceBackend().compile(program, weights, 8), TOKENS, chunk)


def without(config: ModelConfig) -> dict[str, ModelConfig]:
    """The config with each of its features switched off, one at a time."""
    plain = RopeConfig(config.rope.dim, config.rope.theta)
    off: dict[str, Any] = {
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "attention_softcap": None,
        "final_softcap": None,
        "local_rope": None,
        "rope": plain,
        "windows": (None,) * config.layers,
        "attention_scale": 0.0,
        "activation": "silu",
        "embed_scale": 1.0,
        "post_norms": False,
    }
    changed = {name: replace(config, **{name: value}) for name, value in off.items() if getattr(config, name) != value}
    changed["theta"] = replace(config, rope=replace(config.rope, theta=config.rope.theta * 4))
    if not config.tied_head:
        changed["head"] = replace(config, tied_head=True)
    changed["norm_eps"] = replace(config, norm_eps=0.5)
    return changed


@pytest.mark.parametrize("case", tiny.CASES)
def test_logits_match_and_every_feature_counts(case: str, tmp_path: Path) -> None:
    expected = tiny.logits(tiny.build(case, tmp_path), TOKENS)
    config = read_config(read_safetensors(tmp_path))
    if case == "phi3-longrope":  # transformers picks the factors by length; ours are fixed at load
        assert config.rope.short_factors != config.rope.long_factors
    assert expected.std() >= 1
    assert np.abs(reference_logits(tmp_path, config) - expected).max() < 1e-3
    assert np.abs(reference_logits(tmp_path, config, chunk=17) - expected).max() < 1e-3
    for name, changed in without(config).items():
        difference = np.abs(reference_logits(tmp_path, changed) - expected).max()
        assert difference > 1e-2, f"switching off {name} changes nothing"


@pytest.mark.parametrize("case", tiny.CASES)
def test_attention_is_not_spread_evenly(case: str, tmp_path: Path) -> None:
    """Otherwise nobody would see a wrong mask, scale or rotation in the logits."""
    assert tiny.evenness(tiny.build(case, tmp_path), TOKENS) < 0.75


def test_longrope_factors_are_fixed_by_the_longest_context(tmp_path: Path) -> None:
    """A model that is loaded for no more than it was first trained with has the short ones."""
    model = tiny.build("phi3-longrope", tmp_path)
    checkpoint = read_safetensors(tmp_path)
    config = read_config(checkpoint)
    short = TOKENS[: config.rope.original - 4]
    program = record_program(config, max_len=config.rope.original, kv_format=KVFormat.F32)
    executable = ReferenceBackend().compile(program, ModelWeights(config, checkpoint), 8)
    assert np.abs(run_alone(executable, short) - tiny.logits(model, short)).max() < 1e-3
    longer = record_program(config, max_len=config.rope.original + 1, kv_format=KVFormat.F32)
    other = ReferenceBackend().compile(longer, ModelWeights(config, checkpoint), 8)
    assert np.abs(run_alone(other, short) - tiny.logits(model, short)).max() > 1e-2
