"""Where a shape comes from: a named one, a number of weights, a config.json, or the header of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

from slipstream.errors import UsageError
from slipstream.program import TENSOR_TYPES, TensorType
from slipstream.roofline.precision import Precision, find_precision
from slipstream.roofline.shape import ModelShape, parameters_only, shape_of
from slipstream.weights.gguf import TensorHeader, read_gguf_header, split_files
from slipstream.weights.safetensors import load_json

_BY_CODE = {kind.code: kind for kind in TENSOR_TYPES.values()}
_HF_PRECISION = {"float32": "f32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Source:
    """A shape, and the precision its weights are stored in, if that is known."""

    shape: ModelShape
    precision: Precision | None = None


@cache
def named_shapes() -> dict[str, dict[str, Any]]:
    """The configs that come with the package, by name; each says where it was taken from."""
    text = files("slipstream.roofline").joinpath("shapes.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def find_source(reference: str) -> Source:
    """A path, "70b", or the name of a shape. Raises UsageError or ModelFileError."""
    path = Path(reference).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return _from_config(path) if path.suffix == ".json" else _from_gguf(path)
    weights = parameters_only(reference)
    if weights is not None:
        return Source(weights)
    key = reference.strip().lower().replace("_", "-")
    known = named_shapes()
    if key in known:
        return Source(shape_of(key, known[key]))
    near = [name for name in known if key and key in name]
    hint = f"did you mean one of {', '.join(near)}?" if near else f"known shapes: {', '.join(known)}"
    raise UsageError(f"{reference!r} is no file, no number of weights (70b) and no known shape; {hint}")


def _from_config(path: Path) -> Source:
    values = load_json(path)
    text = values.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, dict) else values
    kind = values.get("torch_dtype") or values.get("dtype") or inner.get("torch_dtype") or inner.get("dtype")
    quantization = values.get("quantization_config")
    name = _HF_PRECISION.get(str(kind))
    if isinstance(quantization, dict):
        method, bits = str(quantization.get("quant_method", "")), quantization.get("bits")
        name = (
            "fp8" if method == "fp8" else "mxfp4" if method == "mxfp4" else {4: "int4-g128", 8: "int8"}.get(bits or 0)
        )
    shape = shape_of(path.parent.resolve().name if path.name == "config.json" else path.stem, values)
    return Source(shape, find_precision(name) if name else None)


def _from_folder(path: Path) -> Source:
    if (path / "config.json").exists():
        return _from_config(path / "config.json")
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1 or (ggufs and "-00001-of-" in ggufs[0].name):
        return _from_gguf(ggufs[0])
    raise UsageError(f"{path} has neither a config.json nor exactly one GGUF model")


def _from_gguf(path: Path) -> Source:
    metadata, tensors = read_gguf_header(path)
    for part in split_files(path, dict(metadata))[1:]:
        if part.exists():
            tensors += read_gguf_header(part)[1]
    shape = shape_of(path.stem, gguf_config(metadata, tensors))
    return Source(shape, _stored_precision(tensors))


def gguf_config(metadata: Mapping[str, Any], tensors: list[TensorHeader]) -> dict[str, Any]:
    """GGUF metadata under the names of config.json."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise UsageError("general.architecture is missing from the GGUF header")
    names = {
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.sliding_window": "sliding_window",
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "context_length": "max_position_embeddings",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "leading_dense_block_count": "first_k_dense_replace",
    }
    config: dict[str, Any] = {
        ours: metadata[full] for theirs, ours in names.items() if (full := f"{architecture}.{theirs}") in metadata
    }
    by_name = {tensor.name: tensor for tensor in tensors}
    if "token_embd.weight" in by_name:
        config["vocab_size"] = by_name["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in by_name
    if "kv_lora_rank" in config:
        rope = int(metadata.get(f"{architecture}.rope.dimension_count", 64))
        key = int(metadata.get(f"{architecture}.attention.key_length_mla", config.pop("head_dim", 0)))
        value = metadata.get(
            f"{architecture}.attention.value_length_mla", metadata.get(f"{architecture}.attention.value_length")
        )
        config |= {"qk_rope_head_dim": rope, "qk_nope_head_dim": key - rope, "v_head_dim": value}
    if architecture in ("gemma2", "gemma3"):
        config["sliding_window_pattern"] = 2 if architecture == "gemma2" else 6
    if "blk.0.ffn_gate.weight" not in by_name and "blk.0.ffn_gate_exps.weight" not in by_name:
        fused = by_name.get("blk.0.ffn_up.weight")
        is_fused = fused is not None and fused.shape[0] == 2 * config.get("intermediate_size", 0)
        config["ffn_matrices"] = 3 if is_fused else 2
    return config


def _stored_precision(tensors: list[TensorHeader]) -> Precision:
    """Mean bits of the matrices, and those of embedding and head, as they lie in the file."""
    stored: dict[str, list[float]] = {"body": [0.0, 0.0], "head": [0.0, 0.0], "embedding": [0.0, 0.0]}
    kinds: dict[str, float] = {}
    for tensor in tensors:
        if len(tensor.shape) < 2:
            continue
        kind = _type(tensor)
        part = {"token_embd.weight": "embedding", "output.weight": "head"}.get(tensor.name, "body")
        numbers = prod(tensor.shape)
        stored[part][0] += numbers
        stored[part][1] += kind.nbytes(numbers) * 8
        if part == "body":
            kinds[kind.name] = kinds.get(kind.name, 0) + numbers
    bits = {part: total / numbers for part, (numbers, total) in stored.items() if numbers}
    main = max(kinds, key=lambda name: kinds[name]) if kinds else "F16"
    body = bits.get("body", 16.0)
    floats = main in ("F32", "F16", "BF16")
    embedding = bits.get("embedding", body)
    head = bits.get("head", embedding)
    return Precision(f"{main} (mean {body:.2f} bits)", body, "bf16" if floats else "int8", head, embedding)


def _type(tensor: TensorHeader) -> TensorType:
    if tensor.code not in _BY_CODE:
        raise UsageError(f"tensor {tensor.name!r} is of type {tensor.code}, which is not supported; give --precision")
    return _BY_CODE[tensor.code]
