"""Every architecture from a GGUF file against transformers: names, fused tensors, orders of rows, stored factors.

The files are written as llama.cpp's converter writes them: the gguf package's own names, q and k of Llama in rotary
pairs, one added to Gemma's norms, rotary rules as factors where the format has no other place for them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers

from slipstream.kernels.reference import ReferenceBackend
from slipstream.models import read_config, record_program
from slipstream.models.weights import ModelWeights
from slipstream.program import KVFormat
from slipstream.weights.gguf import read_gguf
from tests import tiny
from tests.models.test_against_transformers import TOKENS, without
from tests.stepping import run_alone

ARCHITECTURES = {"Llama": "llama", "Mistral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3", "Gemma2": "gemma2",
                 "Gemma3Text": "gemma3", "Phi3": "phi3"}  # fmt: skip
LIKE_THE_HEAD = {"query_pre_attn_scalar": 32}
"""What the format cannot say, the models keep to: scores are scaled by the head's width."""
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {},
    "llama-biases": {},
    "llama-llama3": {},
    "llama-linear": {},
    "llama-yarn": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": LIKE_THE_HEAD,
    "gemma3": LIKE_THE_HEAD
    | {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    },
    "phi3": {},
    "phi3-longrope": {},
}
"""By the names of tiny models, and what is changed of them."""


def write(model: transformers.PreTrainedModel, name: str, path: Path) -> None:
    """A model as GGUF, in float32."""
    config, architecture = model.config, ARCHITECTURES[name]
    writer = gguf.GGUFWriter(path, architecture)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    if getattr(config, "sliding_window", None) and name != "Qwen2":
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    rules = config.rope_parameters
    _rope(writer, model, rules.get("full_attention", rules), config)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, kind = key.rsplit(".", 1)
        values = tensor.numpy().astype(np.float32)
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and stem.endswith("norm"):
            values = values + 1.0
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope(writer: gguf.GGUFWriter, model: Any, rules: dict[str, Any], config: Any) -> None:
    """A rule that the format has no name for is kept as factors on the frequencies."""
    writer.add_rope_freq_base(rules["rope_theta"])
    match rules["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rules["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rules["factor"])
            writer.add_rope_scaling_orig_ctx_len(rules["original_max_position_embeddings"])
            if rules.get("beta_fast"):
                writer.add_rope_scaling_yarn_beta_fast(rules["beta_fast"])
            if rules.get("beta_slow"):
                writer.add_rope_scaling_yarn_beta_slow(rules["beta_slow"])
        case "llama3":
            rotary = model.model.rotary_emb
            dim = 2 * len(rotary.inv_freq)
            plain = rules["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
            writer.add_tensor("rope_freqs.weight", (plain / rotary.inv_freq.numpy()).astype(np.float32))
        case "longrope":
            original = config.original_max_position_embeddings
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_tensor("rope_factors_long.weight", np.array(rules["long_factor"], np.float32))
            writer.add_tensor("rope_factors_short.weight", np.array(rules["short_factor"], np.float32))
            scale = config.max_position_embeddings / original
            writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))))


@pytest.mark.parametrize("case", CASES)
def test_logits_match(case: str, tmp_path: Path) -> None:
    model = tiny.build(case, tmp_path / "hf", **CASES[case])
    expected = tiny.logits(model, TOKENS)
    path = tmp_path / "model.gguf"
    write(model, tiny.CASES[case][0], path)
    checkpoint = read_gguf(path)
    config = read_config(checkpoint)
    executable = ReferenceBackend().compile(
        record_program(config, kv_format=KVFormat.F32), ModelWeights(config, checkpoint), 8
    )
    assert expected.std() >= 1
    assert np.abs(run_alone(executable, TOKENS, 1 << 30) - expected).max() < 1e-3
    for name, changed in without(config).items():
        if name == "qkv_bias" or (name == "attention_scale" and changed.scale == config.scale):
            continue
        other = ReferenceBackend().compile(
            record_program(changed, kv_format=KVFormat.F32), ModelWeights(changed, checkpoint), 8
        )
        difference = np.abs(run_alone(other, TOKENS, 1 << 30) - expected).max()
        assert difference > 1e-2, f"switching off {name} changes nothing"


def test_yarn_says_more_than_its_factor(tmp_path: Path) -> None:
    """How fast and how slow turns are told apart, and how much longer queries and keys become."""
    rules = tiny.CASES["llama-yarn"][1]["rope_parameters"] | {"beta_fast": 8.0, "beta_slow": 2.0}
    model = tiny.build("llama-yarn", tmp_path / "hf", rope_parameters=rules)
    path = tmp_path / "model.gguf"
    write(model, "Llama", path)
    config = read_config(read_gguf(path))
    assert (config.rope.beta_fast, config.rope.beta_slow) == (8.0, 2.0)
    executable = ReferenceBackend().compile(
        record_program(config, kv_format=KVFormat.F32), ModelWeights(config, read_gguf(path)), 8
    )
    expected = tiny.logits(model, TOKENS)
    assert np.abs(run_alone(executable, TOKENS, 1 << 30) - expected).max() < 1e-3
    assert replace(config.rope, attention_factor=1.5).table(512)[1] == 1.5
