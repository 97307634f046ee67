"""Every field of config.json that changes answers: obeyed as transformers obeys it, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from slipstream.errors import ModelFileError, SlipstreamError, UnsupportedModelError
from slipstream.models import ModelConfig, read_config
from slipstream.program import TENSOR_TYPES
from slipstream.weights import Checkpoint, StoredTensor
from slipstream.weights.safetensors import read_safetensors
from tests import tiny
from tests.models.test_against_transformers import TOKENS, reference_logits

Said = dict[str, Any]
OBEYED: dict[str, tuple[str, Said, Said]] = {
    "llama3, low": ("llama-llama3", {}, {"low_freq_factor": 2.0}),
    "llama3, high": ("llama-llama3", {}, {"high_freq_factor": 2.0}),
    "llama3, original": ("llama-llama3", {}, {"original_max_position_embeddings": 24}),
    "yarn, original": ("llama-yarn", {}, {"original_max_position_embeddings": 24}),
    "yarn, fast": ("llama-yarn", {}, {"beta_fast": 2.0}),
    "yarn, slow": ("llama-yarn", {}, {"beta_slow": 0.25}),
    "yarn, attention": ("llama-yarn", {}, {"attention_factor": 1.6}),
    "yarn, mscale": ("llama-yarn", {}, {"mscale": 4.0, "mscale_all_dim": 0.5}),
    "yarn, truncate": ("llama-yarn", {}, {"truncate": False}),
    "longrope, factor": ("phi3-longrope", {}, {"factor": 300.0}),
    "longrope, attention": ("phi3-longrope", {}, {"attention_factor": 1.6}),
    "longrope, original": ("phi3-longrope", {"original_max_position_embeddings": 8}, {}),
    "phi3, half of a head": ("phi3", {}, {"partial_rotary_factor": 0.5}),
    "llama, gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}, {}),
    "qwen2, gelu": ("qwen2", {"hidden_act": "gelu_pytorch_tanh"}, {}),
    "qwen3, gelu": ("qwen3", {"hidden_act": "gelu_pytorch_tanh"}, {}),
    "phi3, gelu": ("phi3", {"hidden_act": "gelu_pytorch_tanh"}, {}),
    "gemma2, silu": ("gemma2", {"hidden_activation": "silu"}, {}),
    "gemma2, biases": ("gemma2", {"attention_bias": True}, {}),
    "gemma3, cap": ("gemma3", {"final_logit_softcapping": 5.0}, {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}, {}),
    "qwen2, layers": (
        "qwen2-window",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {},
    ),
}
"""What is said beside a tiny model's own fields, and beside its rules of rotation."""


@pytest.mark.parametrize("name", OBEYED)
def test_obeyed(name: str, tmp_path: Path) -> None:
    """As transformers does it, and each field alone counts."""
    case, fields, rules = OBEYED[name]
    own = tiny.BASE | tiny.CASES[case][1]
    own_rules = own.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 10_000.0})
    model = tiny.build(case, tmp_path, **fields, rope_parameters=own_rules | rules)
    expected = tiny.logits(model, TOKENS)
    checkpoint = read_safetensors(tmp_path)
    assert np.abs(reference_logits(tmp_path, read_config(checkpoint)) - expected).max() < 1e-3
    said = checkpoint.metadata
    fewer = [{**said, key: own.get(key)} for key in fields]
    fewer += [{**said, "rope_parameters": said["rope_parameters"] | {key: own_rules.get(key)}} for key in rules]
    for metadata in fewer:
        config = read_config(replace(checkpoint, metadata=metadata))
        assert np.abs(reference_logits(tmp_path, config) - expected).max() > 1e-2


HF_CONFIGS = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Gemma2ForCausalLM": "Gemma2Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "Phi3ForCausalLM": "Phi3Config",
}


def read(architecture: str, fields: Said) -> ModelConfig:
    metadata = fields | {"architectures": [architecture]}
    return read_config(Checkpoint("safetensors", (Path("model.safetensors"),), metadata, {}))


@pytest.mark.parametrize("architecture", HF_CONFIGS)
@pytest.mark.parametrize(
    "more", [{}, {"use_sliding_window": True}, {"use_sliding_window": True, "max_window_layers": 5}]
)
def test_what_is_left_out_is_what_transformers_takes(architecture: str, more: Said) -> None:
    kind = getattr(transformers, HF_CONFIGS[architecture])
    sizes = {"hidden_size": 4096, "intermediate_size": 64, "num_hidden_layers": 36, "num_attention_heads": 32}
    sizes |= {"vocab_size": 199, "model_type": kind.model_type} | more
    whole = kind(**{key: value for key, value in sizes.items() if key != "model_type"})
    assert read(architecture, sizes) == read(architecture, whole.to_dict())


def test_gemma3_as_google_has_it() -> None:
    """Little more than sizes, inside text_config."""
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = read("Gemma3ForConditionalGeneration", {"text_config": text})
    whole = transformers.Gemma3Config(text_config=text).text_config.to_dict()
    assert config == read("Gemma3ForCausalLM", whole)
    assert (config.rope.theta, config.rope.factor, config.vocabulary) == (1e6, 8.0, 262_208)


REFUSED: dict[str, Said] = {
    "attention_chunk_size": {"attention_chunk_size": 8192},
    "attention_multiplier": {"attention_multiplier": 0.1},
    "attn_temperature_tuning": {"attn_temperature_tuning": True},
    "clip_qkv": {"clip_qkv": 8.0},
    "dim_model_base": {"dim_model_base": 256},
    "embedding_multiplier": {"embedding_multiplier": 12.0},
    "hidden_act": {"hidden_act": "gelu"},
    "layer_types": {"layer_types": ["full_attention", "full_attention", "linear_attention"]},
    "logit_scale": {"logit_scale": 0.06},
    "logits_scaling": {"logits_scaling": 8.0},
    "no_rope_layers": {"no_rope_layers": [1, 1, 0]},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "qk_layernorm": {"qk_layernorm": True},
    "quantization_config": {"quantization_config": {"quant_method": "fp8"}},
    "residual_multiplier": {"residual_multiplier": 0.2},
    "rope_scaling": {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "scale_depth": {"scale_depth": 1.4},
    "scale_emb": {"scale_emb": 12},
    "use_bidirectional_attention": {"use_bidirectional_attention": True},
    "use_mrope": {"use_mrope": True},
    "use_qk_norm": {"use_qk_norm": True},
}
"""By the name that the error says."""
NEUTRAL: Said = dict.fromkeys(REFUSED) | {
    "attn_temperature_tuning": False,
    "embedding_multiplier": 1.0,
    "hidden_act": "silu",
    "logit_scale": 1,
    "logits_scaling": 1.0,
    "partial_rotary_factor": 1.0,
    "qk_layernorm": False,
    "residual_multiplier": 1.0,
    "scale_emb": 1,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "use_qk_norm": False,
}


@pytest.mark.parametrize("field", REFUSED)
def test_refused_by_name(field: str) -> None:
    with pytest.raises(SlipstreamError, match=rf"config\.json: {field}: "):
        read("LlamaForCausalLM", tiny.BASE | REFUSED[field])
    assert read("LlamaForCausalLM", tiny.BASE | {field: NEUTRAL[field]}) == read("LlamaForCausalLM", tiny.BASE)


@pytest.mark.parametrize(
    ("architecture", "fields", "problem"),
    [
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation: 'gelu'"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: '50.0'"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "sliding_window_pattern: 0"),
        ("Gemma3ForCausalLM", {"layer_types": "all"}, "layer_types: is not a list"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}}, "partial_ro"),
        ("Gemma3ForConditionalGeneration", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window: is false"),
    ],
)
def test_refused_by_some(architecture: str, fields: Said, problem: str) -> None:
    with pytest.raises(SlipstreamError, match=problem):
        read(architecture, tiny.BASE | fields)


GGUF = {"block_count": 4, "embedding_length": 8, "attention.head_count": 2, "feed_forward_length": 8}
GGUF |= {"context_length": 64, "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 16}


def read_file(architecture: str, fields: Said, *more: StoredTensor) -> ModelConfig:
    """From a GGUF file's metadata, and tensors beside the embedding's."""
    metadata = {f"{architecture}.{key}": value for key, value in (GGUF | fields).items()}
    table = StoredTensor("token_embd.weight", TENSOR_TYPES["F32"], (9, 8), np.zeros(288, np.uint8))
    metadata["general.architecture"] = architecture
    tensors = {tensor.name: tensor for tensor in (table, *more)}
    return read_config(Checkpoint("gguf", (Path("model.gguf"),), metadata, tensors))


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("attention.scale", 0.25, 0.0),
        ("attention.causal", False, True),
        ("attention.clamp_kqv", 8.0, 0.0),
        ("embedding_scale", 0.25, 1.0),
        ("residual_scale", 0.25, 1.0),
        ("logit_scale", 0.25, 0.0),
        ("rope.scale_linear", 4.0, 1.0),
        ("rope.scaling.yarn_ext_factor", 0.0, 1.0),
        ("rope.scaling.yarn_ext_factor", 0.5, -1.0),
    ],
)
def test_refused_in_gguf(key: str, value: object, neutral: object) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"llama\.{key}: '{value}'"):
        read_file("llama", YARN | {key: value})
    assert read_file("llama", YARN | {key: neutral}) == read_file("llama", YARN)


def test_two_rules_of_rotation_in_gguf() -> None:
    divisors = StoredTensor("rope_freqs.weight", TENSOR_TYPES["F32"], (2,), np.ones(2, np.float32).view(np.uint8))
    assert read_file("llama", {"rope.scaling.factor": 1.0}, divisors).rope.kind == "divisors"
    with pytest.raises(ModelFileError, match=r"llama\.rope\.scaling\.type: 'yarn' is not supported beside rope_freqs"):
        read_file("llama", YARN, divisors)
    with pytest.raises(UnsupportedModelError, match=r"llama\.rope\.scaling\.attn_factor: '1.5'"):
        read_file("llama", {"rope.scaling.attn_factor": 1.5})


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
@pytest.mark.parametrize(
    ("pattern", "windows"),
    [(3, (16, 16, None, 16)), (1, (None,) * 4), (np.array([True, False, False, True]), (16, None, None, 16))],
)
def test_patterns_in_gguf(architecture: str, pattern: object, windows: tuple[int | None, ...]) -> None:
    assert read_file(architecture, {"attention.sliding_window_pattern": pattern}).windows == windows


@pytest.mark.parametrize("pattern", [0, "x", np.array([True] * 3), np.array([1.0] * 4)])
def test_patterns_that_are_none(pattern: object) -> None:
    with pytest.raises(ModelFileError, match=r"gemma3\.attention\.sliding_window_pattern: is neither"):
        read_file("gemma3", {"attention.sliding_window_pattern": pattern})
