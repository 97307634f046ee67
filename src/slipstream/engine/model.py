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
from slipstream.kernels.native.packing import plan
from slipstream.models import ModelConfig, read_config, record_program
from slipstream.models.weights import ModelWeights
from slipstream.program import BLOCK_SLOTS, CacheSpec, KVFormat, Namespace, Program
from slipstream.roofline.memory import available_memory, usable_memory
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
"""Shares of the memory that is free now and that the weights leave: a server's cache takes the first by itself, what
is moved out of it the second; and the full sequences that both stop at.
"""
BUFFERS = 3
"""Buffers that values of one width take, as a rule: they are used again as soon as nobody reads them."""

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
    weights = ModelWeights(config, checkpoint)
    held = _packed_bytes(options, program, weights, checkpoint)
    if options.backend == "native":
        held += buffer_bytes(program, options.max_rows)
    blocks, spare = share_memory(options, max_len, program.cache.bytes_per_block, held)
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


def share_memory(options: LoadOptions, max_len: int, block_bytes: int, weight_bytes: int) -> tuple[int, int]:
    """Blocks of the cache, and those beside it for what is moved out of it; `weight_bytes` are those of buffers, too.

    Raises UsageError if not even one sequence of full length fits, or what was asked for is more than there is: the
    cache's memory is taken as it is used, and what is too large would end the engine under load.
    """
    own, with_each = options.beside
    each, both = -(-max_len // BLOCK_SLOTS), block_bytes + with_each
    available = available_memory()
    left = max(available - weight_bytes - own, 0)
    asked = max(options.spare_bytes, 0) // block_bytes
    if options.cache_bytes is not None:
        blocks = options.cache_bytes // block_bytes
    elif options.sequences:
        blocks = each * options.sequences
    else:
        blocks = min(max(int(CACHE_SHARE * left) // both, each), MOST_SEQUENCES * each, left // both - asked)
    if blocks < each:
        room = options.cache_bytes if options.cache_bytes is not None else max(blocks, 0) * block_bytes
        raise UsageError(
            f"a sequence of {max_len} tokens needs {each * block_bytes / 1e9:.2f} GB of cache, there are "
            f"{room / 1e9:.2f}{_of_memory(weight_bytes + own, available)}; shorten --max-model-len, or take "
            "--kv-cache-dtype int8"
        )
    spare = asked
    if options.spare_bytes < 0:  # by itself never more than the cache has
        spare = min(int(SPARE_SHARE * max(left - blocks * both, 0)) // both, blocks)
    on_device = options.backend.startswith("torch")  # of its memory nothing is known here
    if (blocks + spare) * both > left and not on_device:
        raise UsageError(
            f"{blocks * both / 1e9:.2f} GB of cache and {spare * both / 1e9:.2f} GB for what is moved out of it do not "
            f"fit into memory{_of_memory(weight_bytes + own, available)}; smaller --kv-cache-gb and --kv-offload-gb do"
        )
    return blocks, spare


def _of_memory(weight_bytes: int, available: int) -> str:
    return (
        f" beside {weight_bytes / 1e9:.2f} GB of weights and buffers (memory: {available / 1e9:.2f} GB are free now of "
        f"{usable_memory() / 1e9:.2f})"
    )


def buffer_bytes(program: Program, rows: int) -> int:
    """What logits and activations of a step of so many rows take, about: values of one width share a few buffers."""
    return 4 * rows * (program.vocabulary + BUFFERS * sum({*program.widths} - {program.vocabulary}))


def _packed_bytes(options: LoadOptions, program: Program, weights: ModelWeights, checkpoint: Checkpoint) -> int:
    """Bytes of the weights as they will be held."""
    if options.backend != "native":
        return checkpoint.nbytes
    matrices = (use for use in program.weights.values() if use.role != "vector")
    return sum(plan(use, weights, program.shard, options.quantization).nbytes for use in matrices)


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
