"""The parts of config.json that all architectures share."""

from __future__ import annotations

from typing import Any

from slipstream.errors import UnsupportedModelError
from slipstream.models.config import Fields
from slipstream.models.rope import RopeConfig


def common(f: Fields, architecture: str) -> dict[str, Any]:
    """Keyword arguments of ModelConfig; an architecture adds or replaces its own."""
    layers, hidden, heads = (
        f.integer("num_hidden_layers"),
        f.integer("hidden_size"),
        f.integer("num_attention_heads"),
    )
    if heads < 1:
        raise f.fail("num_attention_heads", f"{heads} is not positive")
    head_dim = f.integer("head_dim", hidden // heads)
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
        "rope": rope(f, head_dim),
        "windows": (None,) * max(layers, 0),
        "tied_head": f.flag("tie_word_embeddings", False),
    }


def windows(f: Fields, layers: int, default: list[bool]) -> tuple[int | None, ...]:
    """Per layer the sliding window or None, from `layer_types` or, without it, `default`."""
    kinds = f.get("layer_types")
    sliding = default if kinds is None else [kind == "sliding_attention" for kind in kinds]
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
    scaling = parameters if "rope_type" in parameters else f.section("rope_scaling")
    if theta_key != "rope_theta" and "rope_theta" not in parameters:
        scaling = Fields(f.path, {})
    theta = parameters.number("rope_theta", f.number(theta_key, 10_000.0))
    partial = parameters.number("partial_rotary_factor", f.number("partial_rotary_factor", 1.0))
    dim = int(head_dim * partial)
    if dim < 2 or dim % 2:
        raise f.fail("partial_rotary_factor", f"{partial} leaves {dim} rotary dimensions")
    name = scaling.get("rope_type", scaling.get("type", "default"))
    context = f.integer("max_position_embeddings", 2048)
    original = int(
        scaling.number(
            "original_max_position_embeddings",
            f.number("original_max_position_embeddings", float(context)),
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
                context / original,
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
