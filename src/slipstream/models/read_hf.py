"""The parts of config.json that all architectures share."""

from __future__ import annotations

from typing import Any

from slipstream.errors import UnsupportedModelError
from slipstream.models.config import Fields
from slipstream.models.rope import RopeConfig
from slipstream.program.ops import Activation

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_temperature_tuning": (False,),
    "clip_qkv": (),
    "dim_model_base": (),
    "embedding_multiplier": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "no_rope_layers": (),
    "qk_layernorm": (False,),
    "quantization_config": (),
    "residual_multiplier": (1,),
    "scale_depth": (),
    "scale_emb": (1,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
}
"""What relatives of these models add to their configs, and the values that change nothing."""


def common(
    f: Fields, architecture: str, *, act: str = "hidden_act", usual_act: str = "silu", part_of_heads: bool = False
) -> dict[str, Any]:
    """Keyword arguments of ModelConfig; an architecture adds or replaces its own.

    `act` is its activation's field; `part_of_heads`: it may rotate only a part of each head.
    """
    f.only(act, *_ACTIVATIONS)
    for key, neutral in _NEUTRAL.items():
        f.only(key, *neutral)
    layers, hidden, heads = (
        f.integer("num_hidden_layers"),
        f.integer("hidden_size"),
        f.integer("num_attention_heads"),
    )
    if heads < 1:
        raise f.fail("num_attention_heads", f"{heads} is not positive")
    head_dim = f.integer("head_dim", hidden // heads)
    bias = f.flag("attention_bias", False)
    return {
        "architecture": architecture,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": f.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "ffn": f.integer("intermediate_size"),
        "vocabulary": f.integer("vocab_size"),
        "context": f.integer("max_position_embeddings", 2048),
        "norm_eps": f.number("rms_norm_eps", 1e-6),
        "rope": rope(f, head_dim) if part_of_heads else whole_heads(f, rope(f, head_dim), head_dim),
        "windows": (None,) * max(layers, 0),
        "tied_head": f.flag("tie_word_embeddings", False),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": f.flag("mlp_bias", False),
        "activation": _ACTIVATIONS[f.get(act, usual_act)],
    }


def whole_heads(f: Fields, rope: RopeConfig, head_dim: int) -> RopeConfig:
    """`rope`. Raises UnsupportedModelError if it turns a part of each head, which transformers does for Phi-3 alone."""
    if rope.dim != head_dim:
        problem = f"a rotation of {rope.dim} of {head_dim} dimensions is not supported"
        raise UnsupportedModelError(f"{f.path}: partial_rotary_factor: {problem}")
    return rope


def windows(f: Fields, layers: int, default: list[bool]) -> tuple[int | None, ...]:
    """Per layer the sliding window or None, from `layer_types` or, without it, `default`."""
    kinds = f.get("layer_types", ["sliding_attention" if local else "full_attention" for local in default])
    if not isinstance(kinds, list):
        raise f.fail("layer_types", "is not a list")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"{f.path}: layer_types: {str(kind)[:40]!r} is not supported")
    sliding = [kind == "sliding_attention" for kind in kinds]
    if len(sliding) != layers:
        raise f.fail("layer_types", f"has {len(sliding)} entries for {layers} layers")
    if not any(sliding):
        return (None,) * layers
    window = f.integer("sliding_window")
    return tuple(window if local else None for local in sliding)


def rope(f: Fields, head_dim: int, kind: str = "full_attention", theta_key: str = "rope_theta") -> RopeConfig:
    """The rotary embedding, from `rope_parameters` or the older `rope_theta` and `rope_scaling`.

    `kind` picks one of the per-layer-type entries that some configs have.
    """
    parameters = f.section("rope_parameters")
    if kind in parameters:
        parameters = parameters.section(kind)
    older = Fields(f.path, {}) if kind == "sliding_attention" else f.section("rope_scaling")
    if parameters.values and not older.values.items() <= parameters.values.items():
        raise f.fail("rope_scaling", "says something else than rope_parameters")
    scaling = parameters if parameters.values else older
    theta = scaling.number("rope_theta", f.number(theta_key, 10_000.0))
    partial = scaling.number("partial_rotary_factor", f.number("partial_rotary_factor", 1.0))
    dim = int(head_dim * partial)
    if dim < 2 or dim % 2:
        raise f.fail("partial_rotary_factor", f"{partial} leaves {dim} rotary dimensions")
    name = scaling.get("rope_type", scaling.get("type", "default"))
    context = f.integer("max_position_embeddings", 2048)
    original = int(
        f.number(
            "original_max_position_embeddings",
            scaling.number("original_max_position_embeddings", float(context)),
        )
    )
    match name:
        case "default" | "none":
            return RopeConfig(dim, theta)
        case "linear":
            return RopeConfig(dim, theta, "linear", scaling.number("factor"))
        case "llama3":
            return RopeConfig(
                dim,
                theta,
                "llama3",
                scaling.number("factor"),
                original,
                scaling.number("low_freq_factor"),
                scaling.number("high_freq_factor"),
            )
        case "yarn":
            return RopeConfig(
                dim,
                theta,
                "yarn",
                scaling.number("factor", context / original),
                original,
                beta_fast=scaling.number("beta_fast", 32.0),
                beta_slow=scaling.number("beta_slow", 1.0),
                attention_factor=scaling.optional_number("attention_factor"),
                mscale=scaling.optional_number("mscale"),
                mscale_all_dim=scaling.optional_number("mscale_all_dim"),
                truncate=scaling.flag("truncate", True),
            )
        case "longrope" | "su":
            return RopeConfig(
                dim,
                theta,
                "longrope",
                scaling.number("factor", context / original),
                original,
                attention_factor=scaling.optional_number("attention_factor"),
                short_factors=_factors(scaling, "short_factor", dim),
                long_factors=_factors(scaling, "long_factor", dim),
            )
    raise UnsupportedModelError(f"{f.path}: rope scaling {str(name)[:40]!r} is not supported")


def _factors(f: Fields, key: str, dim: int) -> tuple[float, ...]:
    values = f.get(key)
    if not isinstance(values, list) or len(values) != dim // 2:
        raise f.fail(key, f"is not a list of {dim // 2} numbers")
    if not all(isinstance(value, int | float) and value > 0 for value in values):
        raise f.fail(key, "has entries that are not positive numbers")
    return tuple(float(value) for value in values)
