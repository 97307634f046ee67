"""What the engine's process and its client say to one another: msgpack over a private socket, never pickle."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from slipstream.engine.output import Chunk, TokenLogprob
from slipstream.engine.request import Terms
from slipstream.program.sampling import SamplingParams


class Submit(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A request under the client's number."""

    number: int
    prompt: list[int]
    params: SamplingParams
    terms: Terms


class Cancel(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Drop a request."""

    number: int


class Ping(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Answer with Pong."""


class Explain(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Answer with Explained."""

    number: int


class Embed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Answer with Embedded, or Refused: each prompt's hidden states, pooled by their mean or the last one."""

    number: int
    prompts: list[list[int]]
    pooling: str
    normalize: bool
    tenant: str = ""


class Score(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Answer with Scored, or Refused: log-probabilities of the prompts' tokens, and of the `top` likeliest at each."""

    number: int
    prompts: list[list[int]]
    top: int
    tenant: str = ""


class Deploy(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Load a drafter's folder and let it look on or draft; with no folder, change the stage of the one that is there.

    `stage` is shadow, canary, all, or back: take it back. Answered with Deployed.
    """

    number: int
    folder: str
    stage: str
    share: float
    auto: bool


class Stop(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """End when what is running has ended."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What was loaded: for cards, memory plans and /v1/models."""

    model: str
    max_len: int
    vocabulary: int
    threads: int
    isa: str
    numerics: str
    weight_bytes: int
    kv_bytes: int
    kv_format: str
    cache_tokens: int
    spare_bytes: int
    spare_tokens: int
    buffer_bytes: int
    drafter_bytes: int
    prefix_cache: bool
    speculative: str
    verify: str
    ceiling_tok_s: float
    load_seconds: float


@dataclass(frozen=True, slots=True)
class DraftStats:
    """What a drafter brought traffic of one tag; see speculation's Counts."""

    drafter: str
    tag: str
    rounds: int
    drafted: int
    accepted: int
    tries: list[int]
    hits: list[int]
    speedup_predicted: float = 1.0
    speedup_measured: float = 1.0


@dataclass(frozen=True, slots=True)
class ArmStats:
    """What one drafter of a rollout has brought; `lower` is what tau is at least, in all likelihood."""

    answers: int
    verifications: int
    tau: float
    lower: float


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """A new drafter beside the present one. `outcome` says why it was taken back, once it was."""

    candidate: str
    stage: str
    share: float
    auto: bool
    outcome: str | None
    present: ArmStats
    new: ArmStats
    before: str = ""
    """The present drafter's folder, if it was deployed too."""


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine as of now, for gauges; counters count since its start."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    preemptions: int = 0
    saved: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    shelf_hits: int = 0
    drafts: list[DraftStats] = field(default_factory=list)
    speedup_predicted: float = 1.0
    speedup_measured: float = 1.0
    disappointment: str | None = None
    rows: dict[str, int] = field(default_factory=dict)
    step_rows: dict[int, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    rollout: RolloutStats | None = None


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Seconds and tokens of a request that has ended; `generated_tokens` are those of all its `choices`."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    preemptions: int
    ceiling_fraction: float
    verifications: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    tau: float = 1.0
    tau_without_bonus: float = 0.0
    acceptance_by_position: list[float] = field(default_factory=list)
    choices: int = 1

    @property
    def later_tokens(self) -> float:
        """Tokens after the first one of a choice, on average."""
        return self.generated_tokens / self.choices - 1.0


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The model is loaded."""

    info: EngineInfo


class News(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Chunks of a step, and timings of the requests that ended with it, by the client's number."""

    chunks: list[Chunk]
    timings: dict[int, RequestTimings]


class Refused(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A request that cannot be run, and why."""

    number: int
    reason: str


class Pong(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The engine is there."""

    stats: Stats


class Explained(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The waterfall of the latest traffic as JSON; empty if there was too little."""

    number: int
    waterfall: str


class Embedded(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Vectors, little-endian float32."""

    number: int
    vectors: list[bytes]


class Scored(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Log-probabilities of every token of each prompt but the first."""

    number: int
    scores: list[list[TokenLogprob]]


class Deployed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A drafter was loaded, or its stage changed; or why not."""

    number: int
    problem: str
    warnings: list[str]
    rollout: RolloutStats | None = None


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The model could not be loaded."""

    reason: str
    wrong_use: bool


ToEngine = Submit | Cancel | Ping | Explain | Embed | Score | Deploy | Stop
FromEngine = Ready | News | Refused | Pong | Explained | Embedded | Scored | Deployed | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
