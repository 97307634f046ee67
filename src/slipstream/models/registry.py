"""The registry: which function reads an architecture's config and which records its program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.errors import ModelFileError, UnsupportedModelError
from slipstream.models import gemma, llama, phi3, qwen, read_gguf
from slipstream.models.config import Fields, ModelConfig
from slipstream.models.names import USUAL, Naming
from slipstream.program import KVFormat, Program, Recorder, ShardPlan
from slipstream.weights import Checkpoint

Record = Callable[[Recorder, ModelConfig, int], None]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to read and record one architecture, and what it calls its weights."""

    from_hf: Callable[[Fields], ModelConfig]
    from_gguf: Callable[[Fields, Checkpoint], ModelConfig]
    record: Record
    naming: Naming = USUAL


ARCHITECTURES = {
    "llama": Architecture(llama.from_hf, llama.from_gguf, llama.record, llama.NAMING),
    "qwen2": Architecture(qwen.qwen2_from_hf, qwen.qwen2_from_gguf, qwen.record),
    "qwen3": Architecture(qwen.qwen3_from_hf, qwen.qwen3_from_gguf, qwen.record),
    "gemma2": Architecture(gemma.gemma2_from_hf, gemma.gemma2_from_gguf, gemma.record, gemma.NAMING),
    "gemma3": Architecture(gemma.gemma3_from_hf, gemma.gemma3_from_gguf, gemma.record, gemma.NAMING),
    "phi3": Architecture(phi3.from_hf, phi3.from_gguf, phi3.record, phi3.NAMING),
}

HF_NAMES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Phi3ForCausalLM": "phi3",
}


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """The config of a checkpoint. Raises UnsupportedModelError for an unknown architecture."""
    if checkpoint.kind == "gguf":
        name = checkpoint.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelFileError(checkpoint.files[0], "general.architecture", "is missing")
        if name not in ARCHITECTURES:
            raise _unknown(checkpoint, name, list(ARCHITECTURES))
        return ARCHITECTURES[name].from_gguf(read_gguf.fields(checkpoint), checkpoint)
    path = checkpoint.files[0].parent / "config.json"
    names = checkpoint.metadata.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in HF_NAMES:
        raise _unknown(checkpoint, str(name), list(HF_NAMES))
    return ARCHITECTURES[HF_NAMES[name]].from_hf(Fields(path, checkpoint.metadata))


def _unknown(checkpoint: Checkpoint, name: str, known: list[str]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{checkpoint.files[0]}: architecture {name[:60]!r} is not supported; known: {', '.join(known)}"
    )


def record_program(
    config: ModelConfig,
    *,
    max_len: int | None = None,
    kv_format: KVFormat = KVFormat.BF16,
    shard: ShardPlan | None = None,
    taps: tuple[int, ...] = (),
) -> Program:
    """Record a model's program for contexts up to `max_len` (default: the model's own)."""
    shard = shard or ShardPlan()
    kv_heads = shard.part(config.kv_heads, "key-value heads")
    recorder = Recorder(config.cache(kv_format, kv_heads), shard, taps)
    ARCHITECTURES[config.architecture].record(recorder, config, max_len or config.context)
    return recorder.program()
