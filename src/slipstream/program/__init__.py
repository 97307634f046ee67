"""The inner language: op set, tensor formats, rows and step shapes, cache specs, the recorder."""

from slipstream.program import ops
from slipstream.program.cache import (
    BLOCK_SLOTS,
    CacheGroup,
    CacheSpec,
    GroupKind,
    KVFormat,
    Namespace,
)
from slipstream.program.draft import Draft, Proposal
from slipstream.program.formats import TENSOR_TYPES, TensorType
from slipstream.program.program import Program, Recorder, ShardPlan, WeightUse
from slipstream.program.rows import NO_PARENT, Row, Rows, sampled
from slipstream.program.shape import SpanShape, StepShape

__all__ = [
    "BLOCK_SLOTS",
    "NO_PARENT",
    "TENSOR_TYPES",
    "CacheGroup",
    "CacheSpec",
    "Draft",
    "GroupKind",
    "KVFormat",
    "Namespace",
    "Program",
    "Proposal",
    "Recorder",
    "Row",
    "Rows",
    "ShardPlan",
    "SpanShape",
    "StepShape",
    "TensorType",
    "WeightUse",
    "ops",
    "sampled",
]
