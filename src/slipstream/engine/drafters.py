"""From what --speculative says to a controller: auto, off, ngram, suffix, draft:MODEL, or a drafter's folder."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipstream.engine.model import DEFAULT_MAX_LEN, LoadOptions, Model, Progress, load_model
from slipstream.errors import UsageError
from slipstream.kernels import Executable
from slipstream.kernels.native import NativeBackend, NativeExecutable
from slipstream.kernels.native.packing import Quantization
from slipstream.models import ModelConfig, read_config, record_program
from slipstream.models.weights import ModelWeights, StoredRows, WeightSource
from slipstream.program import KVFormat, Program, ShardPlan, WeightUse
from slipstream.speculation import (
    Controller,
    Drafter,
    ExactVerification,
    GrammarDrafter,
    ModelDrafter,
    SuffixDrafter,
    Verification,
)
from slipstream.speculation.card import Card, fingerprint_of, read_card, warnings_for
from slipstream.speculation.checkpoint import DrafterWeights, Family, family_of
from slipstream.speculation.drafter import Needs
from slipstream.speculation.dspark import DSparkDrafter
from slipstream.speculation.dspark_model import (
    DSparkConfig,
    dspark_weights,
    read_dspark,
    record_block,
    record_context,
)
from slipstream.speculation.eagle3 import Eagle3Drafter
from slipstream.speculation.eagle3_model import Eagle3Config, eagle3_weights, read_eagle3, record_eagle3
from slipstream.speculation.eagle3_tree import Eagle3TreeDrafter, TreeShape
from slipstream.speculation.markov import MarkovHeads
from slipstream.speculation.reduced_head import first_tokens, with_reduced_head
from slipstream.speculation.rejection import RejectionVerification
from slipstream.speculation.settings import Drawing
from slipstream.speculation.tapped import TappedDrafter
from slipstream.text import Tokenizer, load_tokenizer
from slipstream.weights import Checkpoint
from slipstream.weights.open import open_checkpoint
from slipstream.weights.references import resolve

log = logging.getLogger(__name__)

TAPPED_FORMAT: Quantization = "int4"
DRAFTER_FORMAT: Quantization = "int4-128"
TAPPED_BITS, DRAFTER_BITS = 4.5, 4.125
"""Of a weight, its scales included."""
DRAFTED_TOKENS = 24 << 10
"""A draft model's weights, and the tokens of its head, the special ones besides: what a pass reads decides its price.
"""
_COMPARED = 1024
"""Tokens of two vocabularies that are compared."""


@dataclass(frozen=True, slots=True)
class Speculative:
    """A checked value of --speculative."""

    kind: str
    reference: str = ""
    tree: TreeShape | None = None
    only: bool = False
    """Whether nothing is drafted from text that was there before."""

    @property
    def neural(self) -> bool:
        """Whether there is a drafter with weights of its own."""
        return self.kind in ("draft", "folder")

    @classmethod
    def parse(cls, text: str) -> Speculative:
        """Raises UsageError for a value that cannot be one."""
        if text.endswith(",only"):
            wanted = replace(cls.parse(text.removesuffix(",only")), only=True)
            if not wanted.reference:
                raise UsageError(f"only a draft model or a drafter's folder can draft alone, not {wanted.kind}")
            return wanted
        text, _, tree = text.partition(",tree=")
        if tree:
            sizes = [int(size) if size.isdigit() else 0 for size in tree.split("x")]
            if len(sizes) != 3 or not all(1 <= size <= 64 for size in sizes):
                raise UsageError(f"a tree is TOKENSxDEPTHxBRANCHES, each from 1 to 64, not {tree!r}")
            return replace(cls.parse(text), tree=TreeShape(*sizes))
        if text in ("auto", "off", "ngram", "suffix"):
            return cls(text)
        if text.startswith("draft:") and len(text) > len("draft:"):
            return cls("draft", text.removeprefix("draft:"))
        if "/" in text or text.startswith("."):
            return cls("folder", text)
        raise UsageError(
            "--speculative is auto, off, ngram, suffix, draft:MODEL or a drafter's folder (with a /), "
            f"perhaps with ,tree=TOKENSxDEPTHxBRANCHES or ,only; not {text!r}"
        )


def verification_of(rule: str) -> Verification:
    """The rule that --verify names. Raises UsageError."""
    match rule:
        case "exact":
            return ExactVerification()
        case "rejection":
            return RejectionVerification()
    raise UsageError(f"--verify is exact or rejection, not {rule!r}")


@dataclass(frozen=True, slots=True)
class Folder:
    """A drafter's folder, looked into: its card, its family and config for one target."""

    path: Path
    checkpoint: Checkpoint
    card: Card
    family: Family
    config: Eagle3Config | DSparkConfig

    @classmethod
    def open(cls, path: Path, target: ModelConfig) -> Folder:
        """Raises SlipstreamError for a folder that holds no drafter for such a target."""
        checkpoint = open_checkpoint(path)
        family = family_of(checkpoint)
        read = read_eagle3 if family == "eagle3" else read_dspark
        return cls(path, checkpoint, read_card(path), family, read(checkpoint, target.layers, target.hidden))


def load_speculative(
    reference: str,
    options: LoadOptions,
    wanted: Speculative,
    progress: Progress | None = None,
    drawing: Drawing | None = None,
) -> tuple[Model, Controller | None]:
    """A target and whatever drafts for it. Raises SlipstreamError with the reason.

    `drawing` is how neural drafters draw for answers that are sampled: "own" for verification by rejection; by default
    as was measured to be the better for their family.
    """
    if options.backend != "native" and wanted.kind != "off":
        raise UsageError("drafts need the native backend: say --speculative off")
    if not wanted.neural:
        model = load_model(reference, options, progress)
        return model, _controller(wanted, model, progress, drawing)
    target = open_checkpoint(resolve(reference, progress))
    config = read_config(target)
    resolve(wanted.reference, progress)
    max_len = options.max_len or min(config.context, DEFAULT_MAX_LEN)
    options = replace(options, beside=needs_of(wanted, config, max_len, options.kv_format))
    if wanted.kind != "folder":
        model = load_model(reference, options, progress)
        return model, _controller(wanted, model, progress, drawing)
    folder = Folder.open(resolve(wanted.reference, progress), config)
    model = load_model(reference, replace(options, taps=folder.config.taps), progress)
    drafter = load_tapped_drafter(folder, model, ModelWeights(config, target), drawing, wanted.tree)
    warnings = warnings_for(drafter.fingerprint, fingerprint_of(config, target), wanted.reference, folder.card.made_for)
    for warning in warnings:
        log.warning("%s", warning)
    return model, Controller([drafter] if wanted.only else [*_from_text(), drafter], folder.card)


def _from_text(*, learn: bool = True) -> tuple[Drafter, ...]:
    """What takes no passes: what a grammar leaves no choice about, and text that was there before."""
    return GrammarDrafter(), SuffixDrafter(learn=learn)


def _controller(
    wanted: Speculative, model: Model, progress: Progress | None, drawing: Drawing | None
) -> Controller | None:
    match wanted.kind:
        case "off":
            return None
        case "ngram":
            return Controller(_from_text(learn=False))
        case "draft":
            drafter = load_model_drafter(wanted.reference, model, progress, drawing)
            return Controller([drafter] if wanted.only else [*_from_text(), drafter])
    return Controller(_from_text())


def load_tapped_drafter(
    folder: Folder, target: Model, weights: WeightSource, drawing: Drawing | None = None, tree: TreeShape | None = None
) -> TappedDrafter:
    """EAGLE-3 or DSpark, in int4 on the native backend. The target must have been loaded with the drafter's taps.

    By default they draft the likeliest tokens: how sure they are of a token tells more of its fate when it is not drawn
    with noise.
    """
    drawing = drawing or "likeliest"
    state = f"{folder.family} {folder.path.resolve()} {folder.checkpoint.files[0].stat().st_mtime_ns}"
    kv_format, length, blocks = target.cache.groups[0].format, target.max_len, target.blocks + target.spare_blocks
    config = folder.config
    if isinstance(config, Eagle3Config):
        eagle_weights, tokens = eagle3_weights(config, folder.checkpoint, TargetWeights(target.config, weights))
        first = record_eagle3(config, length, kv_format, state, from_taps=True)
        needs = _needs(config, first, eagle_weights)
        over_taps = _compile(folder, first, eagle_weights, target, needs)
        over_hidden = over_taps.sibling(record_eagle3(config, length, kv_format, state, from_taps=False))
        _set_vocabulary((over_taps, over_hidden), tokens)
        parts = (config, over_taps, over_hidden, state, target.max_rows, blocks, tokens)
        eagle = Eagle3Drafter(*parts, drawing) if tree is None else Eagle3TreeDrafter(*parts, tree)
        return _made_known(eagle, folder, needs, _held_bytes(over_taps, target))
    if tree is not None:
        raise UsageError("a DSpark drafter makes no trees")
    dspark, tokens = dspark_weights(config, folder.checkpoint, TargetWeights(target.config, weights))
    program = record_block(config, length, kv_format, state)
    needs = _needs(config, program, dspark)
    block = _compile(folder, program, dspark, target, needs)
    context = block.sibling(record_context(config, length, kv_format, state))
    heads = MarkovHeads(config, folder.checkpoint, tokens)
    drafter = DSparkDrafter(config, context, block, heads, state, target.max_rows, drawing)
    return _made_known(drafter, folder, needs, _held_bytes(block, target))


def _needs(config: Eagle3Config | DSparkConfig, program: Program, weights: DrafterWeights) -> Needs:
    """The target's hidden states, and its embedding and head where the folder has none of its own."""
    embedding, head = (name in program.weights and not weights.has(name) for name in ("embed.weight", "head.weight"))
    return Needs(config.taps, embedding, head)


def _made_known(drafter: TappedDrafter, folder: Folder, needs: Needs, held_bytes: int) -> TappedDrafter:
    """What it needs, whose it is, and what it holds."""
    drafter.needs, drafter.fingerprint, drafter.held_bytes = needs, folder.card.target_fingerprint, held_bytes
    return drafter


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter that was loaded beside a running engine, and the engine's model as it has to be for it."""

    drafter: TappedDrafter
    card: Card
    model: Model
    warnings: tuple[str, ...]


def load_candidate(folder: Path, model: Model, drawing: Drawing | None = None) -> Candidate:
    """Load a drafter while an engine runs: nothing of the engine is touched. Raises SlipstreamError."""
    checkpoint = open_checkpoint(resolve(model.reference))
    opened = Folder.open(folder, model.config)
    tapped = with_taps(model, opened.config.taps)
    drafter = load_tapped_drafter(opened, tapped, ModelWeights(model.config, checkpoint), drawing)
    drafter.name = f"{drafter.name}:{folder.name}"  # beside another one of its kind
    fingerprint = fingerprint_of(model.config, checkpoint)
    warnings = warnings_for(drafter.fingerprint, fingerprint, str(folder), opened.card.made_for)
    return Candidate(drafter, opened.card, tapped, tuple(warnings))


def with_taps(model: Model, taps: tuple[int, ...]) -> Model:
    """The same model over the same weights and cache, with hidden states handed out. Raises UsageError."""
    executable = model.executable
    if not isinstance(executable, NativeExecutable):
        raise UsageError("a drafter that reads hidden states needs the native backend")
    if executable.program.taps == tuple(f"layer.{tap}" for tap in taps):
        return model
    program = record_program(model.config, max_len=model.max_len, kv_format=model.cache.groups[0].format, taps=taps)
    return replace(model, executable=executable.sibling(program))


class TargetWeights:
    """A target's weights as a drafter asks for them: a tied head is the embedding."""

    def __init__(self, config: ModelConfig, weights: WeightSource):
        self._config, self._weights = config, weights

    def _use(self, use: WeightUse) -> WeightUse:
        return replace(use, name="embed.weight") if use.name == "head.weight" and self._config.tied_head else use

    def stored(self, use: WeightUse, shard: ShardPlan) -> StoredRows | None:
        """The weight as it lies in the file."""
        return self._weights.stored(self._use(use), shard)

    def float32(self, use: WeightUse, shard: ShardPlan) -> npt.NDArray[np.float32]:
        """The weight's numbers."""
        return self._weights.float32(self._use(use), shard)


def _compile(folder: Folder, program: Program, weights: DrafterWeights, target: Model, needs: Needs) -> Executable:
    """Compile for the target's backend, sharing its threads and, where they are the target's, packed matrices."""
    executable = target.executable
    if not isinstance(executable, NativeExecutable):
        from slipstream.kernels.reference import ReferenceBackend

        return ReferenceBackend().compile(program, weights, target.blocks, target.spare_blocks)
    shared = {}
    for name, wanted in (("embed.weight", needs.embedding), ("head.weight", needs.head)):
        theirs = "embed.weight" if name == "head.weight" and target.config.tied_head else name
        if wanted:
            shared[name] = executable.operands.matrices[theirs]
    backend = NativeBackend(
        executable.threads, target.max_rows, TAPPED_FORMAT, folder.checkpoint.files,
        requantize=True, share=executable, matrices=shared,
    )  # fmt: skip
    return backend.compile(program, weights, target.blocks, target.spare_blocks)


def _held_bytes(executable: Executable, target: Model) -> int:
    """Packed matrices that are not the target's, and the cache."""
    if not isinstance(executable, NativeExecutable) or not isinstance(target.executable, NativeExecutable):
        return 0
    theirs = {id(matrix) for matrix in target.executable.operands.matrices.values()}
    own = (matrix.nbytes for matrix in executable.operands.matrices.values() if id(matrix) not in theirs)
    return sum(own) + executable.program.cache.bytes_per_block * (target.blocks + target.spare_blocks)


def needs_of(wanted: Speculative, target: ModelConfig, max_len: int, kv_format: KVFormat) -> tuple[int, int]:
    """Bytes that a drafter will hold of its own and with every block, from its header. Raises SlipstreamError."""
    if not wanted.neural:
        return 0, 0
    path = resolve(wanted.reference)
    if wanted.kind == "draft":
        checkpoint, bits = open_checkpoint(path), DRAFTER_BITS
        program = record_program(read_config(checkpoint), max_len=max_len, kv_format=kv_format)
    else:
        folder, bits = Folder.open(path, target), TAPPED_BITS
        checkpoint, config = folder.checkpoint, folder.config
        record = partial(record_eagle3, from_taps=True) if isinstance(config, Eagle3Config) else record_context
        program = record(config, max_len, kv_format, "to come")  # type: ignore[arg-type]
    weights = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1)
    return round(weights * bits / 8), program.cache.bytes_per_block


def _set_vocabulary(executables: Sequence[Executable], tokens: npt.NDArray[np.int32] | None) -> None:
    for executable in executables:
        if tokens is not None:
            executable.set_vocabulary(tokens)


def load_model_drafter(
    reference: str, target: Model, progress: Progress | None = None, drawing: Drawing | None = None
) -> Drafter:
    """A smaller model as a drafter, in int4 and with a reduced head. Raises UsageError if it does not fit."""
    if not isinstance(target.executable, NativeExecutable):
        raise UsageError("a draft model needs the native backend")
    drawing = drawing or "likeliest"
    checkpoint = open_checkpoint(resolve(reference, progress))
    config = read_config(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    _check_same(reference, tokenizer, target)
    program = record_program(config, max_len=target.max_len, kv_format=target.cache.groups[0].format)
    weights = ModelWeights(config, checkpoint)
    also = {*target.eos, *tokenizer.special.values()}
    tokens = first_tokens(min(config.vocabulary, target.config.vocabulary), DRAFTED_TOKENS, also)
    cut, cut_weights = with_reduced_head(program, weights, tokens)
    report = (lambda done, total: progress("packing the drafter", done, total)) if progress else None
    backend = NativeBackend(
        target.executable.threads, target.max_rows, DRAFTER_FORMAT, checkpoint.files, report,
        requantize=True, share=target.executable,
    )  # fmt: skip
    executable = backend.compile(cut, cut_weights, target.blocks, target.spare_blocks)
    executable.set_vocabulary(tokens)
    drafter = ModelDrafter(executable, f"model {reference}", target.max_rows, tokens, drawing)
    drafter.held_bytes = _held_bytes(executable, target)
    drafter.warm_up(target.blocks - 1)
    return drafter


def _check_same(reference: str, tokenizer: Tokenizer, target: Model) -> None:
    """Raise UsageError unless both models' tokens mean the same."""
    mine, theirs = tokenizer.token_bytes, target.tokenizer.token_bytes
    places = np.linspace(0, min(len(mine), len(theirs)) - 1, _COMPARED).astype(int).tolist()
    if any(mine[place] != theirs[place] for place in places) or tokenizer.eos != target.eos:
        raise UsageError(f"{reference} has another tokenizer than {target.reference}: it cannot draft for it")
