"""Before weights are loaded: what memory a model will take, how fast it should be, and what will hold it back."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.engine.drafters import Speculative, needs_of
from slipstream.engine.model import DEFAULT_MAX_LEN, LoadOptions, buffer_bytes, share_memory
from slipstream.kernels.native.instruments import NativeInstruments
from slipstream.models import read_config, record_program
from slipstream.program import BLOCK_SLOTS, KVFormat
from slipstream.roofline import Ceiling, Setting, ceiling, find_precision, find_source
from slipstream.roofline.memory import usable_memory
from slipstream.roofline.probe import Probe, this_machine
from slipstream.roofline.work import kv_bytes_held, model_bytes
from slipstream.weights.open import open_checkpoint

TYPICAL_SHARE = 0.8
"""Share of the ceiling that one user gets of the native backend (benchmarks/ has 0.65 to 0.95)."""
LEAST_FLOAT = 16
"""Bits of the smallest floats, which are what `quantization` is for."""


@dataclass(frozen=True, slots=True)
class Foresight:
    """Bytes of weights, the whole cache, what is moved out of it, a drafter and buffers, and the memory there is.

    The ceiling is for one user at `context` tokens.
    """

    weight_bytes: float
    cache_bytes: float
    spare_bytes: float
    drafter_bytes: float
    buffer_bytes: float
    memory: int
    ceiling: Ceiling
    context: int

    @property
    def total_bytes(self) -> float:
        """All that will be held."""
        return self.weight_bytes + self.cache_bytes + self.spare_bytes + self.drafter_bytes + self.buffer_bytes

    @property
    def expected_tok_s(self) -> float:
        """Tokens a second for one user, to be expected of this backend."""
        return self.ceiling.tok_s * TYPICAL_SHARE

    @property
    def fits(self) -> bool:
        """Whether all of it fits into memory."""
        return self.total_bytes < self.memory

    def bottleneck(self) -> str:
        """What a token waits for first."""
        work, time = self.ceiling.work, self.ceiling.time
        if time.bound != "memory":
            return f"{time.bound}, even for one user"
        if work.kv_bytes > work.weight_bytes:
            return "reading the cache: the context is long for this model"
        share = work.weight_bytes / work.bytes
        return f"reading the weights ({share:.0%} of {work.bytes / 1e6:.0f} MB a token)"

    def compared(self, rates: Sequence[float]) -> str:
        """What was expected beside the tokens a second that answers really got, for people."""
        if not rates:
            return "nobody asked: there is nothing to compare with what was expected"
        got = statistics.median(rates)
        return (
            f"expected about {self.expected_tok_s:.0f} tokens/s for one user; the median of {len(rates)} answers got "
            f"{got:.0f} ({got / self.expected_tok_s:.0%}), the fastest {max(rates):.0f}"
        )

    def lines(self) -> list[str]:
        """For people."""
        drafter = f" + {self.drafter_bytes / 1e6:.0f} MB for the drafter" if self.drafter_bytes else ""
        room = "fits" if self.fits else "does NOT fit; shorten --max-model-len or take a smaller model"
        return [
            f"memory: {self.weight_bytes / 1e6:.0f} MB weights + {self.cache_bytes / 1e6:.0f} MB cache + "
            f"{self.spare_bytes / 1e6:.0f} MB for what is moved out of it{drafter} + up to "
            f"{self.buffer_bytes / 1e6:.0f} MB of buffers = "
            f"{self.total_bytes / 1e6:.0f} MB of {self.memory / 1e6:.0f} MB: {room}",
            f"expected: about {self.expected_tok_s:.0f} tokens/s for one user at {self.context} tokens of context, "
            f"{TYPICAL_SHARE:.0%} of the ceiling of {self.ceiling.tok_s:.0f} "
            f"({self.ceiling.setting.hardware.bandwidth / 1e9:.1f} GB/s)",
            f"first bottleneck: {self.bottleneck()}",
        ]


def foresee(
    path: Path, options: LoadOptions, context: int, speculative: Speculative, probe: Probe | None = None
) -> Foresight:
    """Look at headers only; `context` tokens are expected in the cache. Raises SlipstreamError."""
    source = find_source(str(path))
    shape, precision = source.shape, source.precision or find_precision("bf16")
    max_len = options.max_len or min(shape.context or DEFAULT_MAX_LEN, DEFAULT_MAX_LEN)
    if options.quantization != "none" and precision.bits >= LEAST_FLOAT:
        precision = find_precision(options.quantization)
    bits = 8.0 if options.kv_format is KVFormat.INT8 else 16.0
    block_bytes = max(1, round(kv_bytes_held(shape, BLOCK_SLOTS, bits)))
    config = read_config(open_checkpoint(path))
    buffers = buffer_bytes(record_program(config, max_len=max_len, kv_format=options.kv_format), options.max_rows)
    own = with_each = 0
    if speculative.neural:
        own, with_each = needs_of(speculative, config, max_len, options.kv_format)
        options = replace(options, beside=(own, with_each))
    weights = model_bytes(shape, precision)
    blocks, spare = share_memory(options, max_len, block_bytes, round(weights) + buffers)
    drafter = own + with_each * (blocks + spare)
    hardware = (probe or this_machine(NativeInstruments())).hardware()
    context = min(context, max_len)
    setting = Setting(shape, hardware, precision, bits, 1, context)
    held = weights, blocks * block_bytes, spare * block_bytes, drafter, buffers
    return Foresight(*held, usable_memory(), ceiling(setting), context)
