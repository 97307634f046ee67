"""Model: a checkpoint made ready to run: config, tokenizer, compiled program, cache."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slipstream.errors import UsageError
from slipstream.kernels import Backend, Executable
from slipstream.kernels.native import NativeExecutable, usable_cores
from slipstream.models import ModelConfig, read_config, record_program
from slipstream.models.weights import ModelWeights
from slipstream.program import BLOCK_SLOTS, CacheSpec, KVFormat, Namespace
from slipstream.roofline.probe import usable_memory
from slipstream.text import Tokenizer, load_tokenizer
from slipstream.weights import Checkpoint
from slipstream.weights.open import open_checkpoint
from slipstream.weights.references import resolve

if TYPE_CHECKING:
    from slipstream.text.template import ChatTemplate

Quantization = Literal["none", "int8", "int4"]
DEFAULT_MAX_LEN = 4096
DEFAULT_SEQUENCES = 4
"""Sequences of full length that the cache holds unless told otherwise."""

CACHE_SHARE, SPARE_SHARE, MOST_SEQUENCES = 0.4, 0.1, 64
"""Shares of the memory beyond the weights that a server's cache takes by itself, and what is moved out of it; and the
full sequences that both stop at.
"""

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, total)."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a model; None means: choose."""

    backend: str = "native"
    """Or another's name, with a colon and its setting if it takes one: `reference`, `torch:cuda:bf16`."""
    max_len: int | None = None
    kv_format: KVFormat = KVFormat.BF16
    quantization: Quantization = "none"
    threads: int | None = None
    max_rows: int = 512
    sequences: int = DEFAULT_SEQUENCES
    """Sequences of full length that the cache holds; 0: as many as a share of memory does."""
    cache_bytes: int | None = None
    """Bytes of the cache, in place of `sequences`."""
    spare_bytes: int = 0
    """Bytes beside the cache for what is moved out of it; -1: a share of memory."""
    pack_cache: bool = True
    beside: tuple[int, int] = (0, 0)
    """Bytes that a drafter takes of the same memory: of its own, and with every block of the cache."""
    taps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Model:
    """A model that can be stepped."""

    reference: str
    config: ModelConfig
    tokenizer: Tokenizer
    executable: Executable
    cache: CacheSpec
    blocks: int
    max_len: int
    max_rows: int
    file_bytes: int
    eos: frozenset[int] = field(default_factory=frozenset)
    spare_blocks: int = 0
    """Blocks after the cache's own, for sequences that are moved out of it."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.blocks * self.cache.bytes_per_block

    @property
    def buffer_bytes(self) -> int:
        """Bytes of activations and logits, as far as the backend tells."""
        return getattr(self.executable, "buffer_bytes", 0)

    @property
    def spare_bytes(self) -> int:
        """Bytes for what is moved out of the cache."""
        return self.spare_blocks * self.cache.bytes_per_block

    @property
    def namespace(self) -> Namespace:
        """Whose cached blocks may be shared."""
        return Namespace(self.reference, self.executable.numerics, self.cache.groups[0].format)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, compiled when it is first needed. Raises TemplateError."""
        from slipstream.text.template import ChatTemplate

        return ChatTemplate(self.tokenizer.chat_template) if self.tokenizer.chat_template else None

    def chat_prompt(self, messages: list[dict[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation; special tokens written by users stay text."""
        if self.template is None:
            raise UsageError(f"{self.reference} has no chat template; give a plain prompt instead")
        return self.tokenizer.encode_chat(self.template, messages, **variables)


def load_model(reference: str, options: LoadOptions | None = None, progress: Progress | None = None) -> Model:
    """Fetch (if need be), open, pack and compile a model. Raises SlipstreamError with the reason."""
    options = options or LoadOptions()
    path = resolve(reference, progress)
    checkpoint = open_checkpoint(path)
    config = read_config(checkpoint)
    max_len = options.max_len or min(config.context, DEFAULT_MAX_LEN)
    if max_len > config.context:
        raise UsageError(f"--max-model-len {max_len} is more than the model's context of {config.context}")
    kv_format = KVFormat.F32 if options.backend != "native" else options.kv_format
    program = record_program(config, max_len=max_len, kv_format=kv_format, taps=options.taps)
    blocks = cache_blocks(options, max_len, program.cache.bytes_per_block, checkpoint.nbytes)
    spare = spare_blocks(options, blocks, program.cache.bytes_per_block, checkpoint.nbytes)
    weights = ModelWeights(config, checkpoint)
    # Reading packed weights leaves the interpreter free for the tokenizer.
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(_backend(options, checkpoint, progress).compile, program, weights, blocks, spare)
        tokenizer = load_tokenizer(checkpoint)
        executable = compiling.result()
    return Model(
        reference,
        config,
        tokenizer,
        executable,
        program.cache,
        blocks,
        max_len,
        options.max_rows,
        sum(file.stat().st_size for file in checkpoint.files),
        tokenizer.eos,
        spare,
    )


def cache_blocks(options: LoadOptions, max_len: int, block_bytes: int, weight_bytes: int) -> int:
    """Blocks of the cache. Raises UsageError if not even one sequence of full length fits into what it may take."""
    each = -(-max_len // BLOCK_SLOTS)
    if options.cache_bytes is None and options.sequences:
        return each * options.sequences
    room = options.cache_bytes
    if room is None:
        weights, block = options.beside
        room = int(CACHE_SHARE * max(usable_memory() - weight_bytes - weights, 0) * block_bytes / (block_bytes + block))
        room = min(room, MOST_SEQUENCES * each * block_bytes)
    if room < each * block_bytes:
        raise UsageError(
            f"a sequence of {max_len} tokens needs {each * block_bytes / 1e9:.2f} GB of cache, there are "
            f"{room / 1e9:.2f}; shorten --max-model-len, or take --kv-cache-dtype int8"
        )
    return room // block_bytes


def spare_blocks(options: LoadOptions, blocks: int, block_bytes: int, weight_bytes: int) -> int:
    """Blocks beside the cache for what is moved out of it; by itself never more than the cache has."""
    if options.spare_bytes >= 0:
        return options.spare_bytes // block_bytes
    weights, block = options.beside
    both = block_bytes + block
    room = int(SPARE_SHARE * max(usable_memory() - weight_bytes - weights - blocks * both, 0))
    return min(room // both, blocks)


def _backend(options: LoadOptions, checkpoint: Checkpoint, progress: Progress | None) -> Backend:
    if options.backend == "native":
        from slipstream.kernels.native import NativeBackend

        files: tuple[Path, ...] = checkpoint.files if options.pack_cache else ()
        report = (lambda done, total: progress("packing", done, total)) if progress else None
        return NativeBackend(options.threads, options.max_rows, options.quantization, files, report)
    name, _, setting = options.backend.partition(":")
    backend: Backend = import_module(f"slipstream.kernels.{name}").named(setting)
    return backend


def core_to_spare(model: Model) -> bool:
    """Whether steps can be planned while others run, on a core that no kernel needs."""
    executable = model.executable
    if not isinstance(executable, NativeExecutable) or executable.program.taps:
        return False  # a step's hidden states are taken before the next one runs
    return executable.threads < usable_cores()
