"""The parts of GGUF metadata that all architectures share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.errors import UnsupportedModelError
from slipstream.models.config import Fields
from slipstream.models.rope import RopeConfig
from slipstream.weights import Checkpoint


def fields(checkpoint: Checkpoint) -> Fields:
    """The metadata under the architecture's own prefix."""
    architecture = checkpoint.metadata.get("general.architecture")
    return Fields(checkpoint.files[0], checkpoint.metadata, f"{architecture}.")


def common(f: Fields, checkpoint: Checkpoint, architecture: str) -> dict[str, Any]:
    """Keyword arguments of ModelConfig; an architecture adds or replaces its own."""
    if f.get("expert_count"):
        raise UnsupportedModelError(f"{f.path}: mixtures of experts are not supported yet")
    f.only("attention.causal", True)
    for key in ("attention.scale", "attention.clamp_kqv"):
        f.only(key, 0)
    for key in ("embedding_scale", "residual_scale", "logit_scale"):
        f.only(key, 0, 1)  # 0: unset
    layers, hidden, heads = (
        f.integer("block_count"),
        f.integer("embedding_length"),
        f.integer("attention.head_count"),
    )
    if heads < 1:
        raise f.fail("attention.head_count", f"{heads} is not positive")
    head_dim = f.integer("attention.key_length", hidden // heads)
    if f.integer("attention.value_length", head_dim) != head_dim:
        raise f.fail("attention.value_length", "keys and values of different widths are not supported")
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise f.fail("token_embd.weight", "the tensor is missing or not a matrix")
    return {
        "architecture": architecture,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": f.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "ffn": f.integer("feed_forward_length"),
        "vocabulary": embedding.shape[0],
        "context": f.integer("context_length"),
        "norm_eps": f.number("attention.layer_norm_rms_epsilon"),
        "rope": rope(f, checkpoint, head_dim),
        "windows": (None,) * max(layers, 0),
        "tied_head": "output.weight" not in checkpoint.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in checkpoint.tensors,
    }


def rope(f: Fields, checkpoint: Checkpoint, head_dim: int, theta_key: str = "rope.freq_base") -> RopeConfig:
    """The rotary embedding with its scaling, rules and stored factors alike."""
    dim = f.integer("rope.dimension_count", head_dim)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise f.fail("rope.dimension_count", f"{dim} is not an even number up to {head_dim}")
    theta = f.number(theta_key, 10_000.0)
    f.only("rope.scale_linear", 0, 1)  # rope.scaling.factor's name in files of 2023
    kind, factor = f.get("rope.scaling.type", "none"), f.number("rope.scaling.factor", 1.0)
    plain = kind == "none" or factor in (0.0, 1.0)
    if kind != "yarn" and "rope_factors_long.weight" not in checkpoint.tensors:
        f.only("rope.scaling.attn_factor", 1)
    if "rope_freqs.weight" in checkpoint.tensors:
        if not plain:
            raise f.fail("rope.scaling.type", f"{str(kind)[:40]!r} is not supported beside rope_freqs.weight")
        return RopeConfig(dim, theta, "divisors", divisors=_stored(f, checkpoint, "rope_freqs", dim))
    context = f.integer("context_length")
    original = f.integer("rope.scaling.original_context_length", context)
    if "rope_factors_long.weight" in checkpoint.tensors:
        return RopeConfig(
            dim,
            theta,
            "longrope",
            context / max(original, 1),
            original,
            attention_factor=f.optional_number("rope.scaling.attn_factor"),
            short_factors=_stored(f, checkpoint, "rope_factors_short", dim),
            long_factors=_stored(f, checkpoint, "rope_factors_long", dim),
        )
    if plain:
        return RopeConfig(dim, theta)
    if kind == "linear":
        return RopeConfig(dim, theta, "linear", factor)
    if kind == "yarn":
        f.only("rope.scaling.yarn_ext_factor", 1, -1)  # -1: unset
        yarn = RopeConfig(
            dim, theta, "yarn", factor, original, beta_fast=f.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=f.number("rope.scaling.yarn_beta_slow", 1.0),
        )  # fmt: skip
        more = f.number("rope.scaling.yarn_attn_factor", f.number("rope.scaling.attn_factor", 1.0))
        return yarn if more == 1.0 else replace(yarn, attention_factor=more * yarn.table(0)[1])
    raise UnsupportedModelError(f"{f.path}: rope scaling {str(kind)[:40]!r} is not supported")


def _stored(f: Fields, checkpoint: Checkpoint, name: str, dim: int) -> tuple[float, ...]:
    tensor = checkpoint.tensors.get(f"{name}.weight")
    if tensor is None or tensor.shape != (dim // 2,):
        raise f.fail(name, f"the tensor is missing or not of shape [{dim // 2}]")
    values = tensor.float32()
    if not (values > 0).all():
        raise f.fail(name, "has entries that are not positive")
    return tuple(float(value) for value in values)
