"""The ceiling: tokens a second that a machine's memory, arithmetic and links allow a model, and where the knee is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slipstream.roofline.hardware import Hardware
from slipstream.roofline.precision import Precision
from slipstream.roofline.shape import ModelShape
from slipstream.roofline.work import Work, decode_work, kv_bytes_held, model_bytes, prefill_operations

MAX_KNEE = 1 << 16


@dataclass(frozen=True, slots=True)
class Setting:
    """What is asked about: a model in a precision on `devices` equal devices, `batch` sequences of `context`."""

    shape: ModelShape
    hardware: Hardware
    precision: Precision
    kv_bits: float = 16.0
    batch: int = 1
    context: int = 0
    devices: int = 1


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by what takes them. Reading and arithmetic overlap: the longer one counts."""

    memory: float
    arithmetic: float
    collectives: float
    overhead: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return max(self.memory, self.arithmetic) + self.collectives + self.overhead

    @property
    def bound(self) -> str:
        """What a step waits for: "memory", "arithmetic" or "collectives"."""
        if self.collectives > max(self.memory, self.arithmetic):
            return "collectives"
        return "memory" if self.memory >= self.arithmetic else "arithmetic"


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What a setting allows. `bytes_per_token` is what one step reads; rates are tokens a second."""

    setting: Setting
    work: Work
    time: StepTime
    knee_rows: int | None
    needed_bytes: float

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a step reads, all devices together."""
        return self.work.bytes

    @property
    def tok_s(self) -> float:
        """Tokens a second for one user."""
        return 1.0 / self.time.seconds

    @property
    def total_tok_s(self) -> float:
        """Tokens a second for all users together."""
        return self.setting.batch / self.time.seconds

    @property
    def fits(self) -> bool | None:
        """Whether weights and caches fit into memory; None if its size is not known."""
        memory = self.setting.hardware.memory * self.setting.devices
        return self.needed_bytes <= memory if memory else None

    @property
    def devices_needed(self) -> int | None:
        """Devices that hold weights and caches; None if their size is not known."""
        memory = self.setting.hardware.memory
        return max(1, -int(-self.needed_bytes // memory)) if memory else None


def collective_seconds(setting: Setting, rows: int) -> float:
    """Two all-reduces a layer (ring: each device sends 2(n-1)/n of the rows' hidden states in 16 bits)."""
    n, hardware = setting.devices, setting.hardware
    if n == 1:
        return 0.0
    size = 2.0 * rows * setting.shape.hidden
    sending = 2.0 * (n - 1) / n * size / hardware.link_bandwidth if hardware.link_bandwidth else 0.0
    return 2 * setting.shape.depth * (hardware.link_latency + sending)


def step_time(setting: Setting, work: Work, rows: int) -> StepTime:
    """Seconds of a step that does `work`."""
    hardware, n = setting.hardware, setting.devices
    peak, floats = hardware.operations(setting.precision.arithmetic), hardware.operations("bf16")
    arithmetic = work.weight_operations / peak if peak else 0.0
    arithmetic += work.attention_operations / floats if floats else 0.0
    return StepTime(
        work.bytes / hardware.bandwidth / n, arithmetic / n, collective_seconds(setting, rows), hardware.step_overhead
    )


def ceiling(setting: Setting) -> Ceiling:
    """The ceiling of a setting."""
    work = decode_work(setting.shape, setting.precision, setting.batch, setting.context, setting.kv_bits)
    held = kv_bytes_held(setting.shape, setting.context, setting.kv_bits) * setting.batch
    return Ceiling(
        setting,
        work,
        step_time(setting, work, setting.batch),
        knee_rows(setting),
        model_bytes(setting.shape, setting.precision) + held,
    )


def knee_rows(setting: Setting) -> int | None:
    """The fewest rows at which arithmetic takes as long as reading; None: never, or the peak is not known.

    Where every row brings a cache of its own, a long context can keep a step bound by memory for ever.
    """

    def bound(rows: int) -> bool:
        work = decode_work(setting.shape, setting.precision, rows, setting.context, setting.kv_bits)
        time = step_time(setting, work, rows)
        return time.arithmetic >= time.memory

    if not setting.hardware.operations(setting.precision.arithmetic) or not bound(MAX_KNEE):
        return None
    low, high = 0, MAX_KNEE
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bound(middle) else (middle, high)
    return high


def verify_cost(setting: Setting, rows: int) -> float:
    """v(n): a step of n rows of one sequence over a step of one row."""
    single = replace(setting, batch=1)

    def seconds(n: int) -> float:
        work = decode_work(setting.shape, setting.precision, n, setting.context, setting.kv_bits, rows_per_sequence=n)
        return step_time(single, work, n).seconds

    return seconds(rows) / seconds(1)


def prefill_seconds(setting: Setting, tokens: int) -> float:
    """Seconds to read a prompt: its arithmetic, or one read of the weights if that takes longer."""
    hardware = setting.hardware
    peak = hardware.operations(setting.precision.arithmetic)
    arithmetic = prefill_operations(setting.shape, tokens) / peak if peak else 0.0
    read = model_bytes(setting.shape, setting.precision) / hardware.bandwidth
    return max(arithmetic, read) / setting.devices + collective_seconds(setting, tokens)
