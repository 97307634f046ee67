"""The waterfall of a recorded `bench decode` result: one row, no engine around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import UsageError
from slipstream.program import CacheSpec, StepShape
from slipstream.program.op_classes import OP_CLASSES
from slipstream.roofline.accounting import SpanRecord, StepRecord
from slipstream.roofline.cost import CostModel, Curve
from slipstream.roofline.waterfall import Limits, Waterfall, split

_ALONE = CostModel(Curve((1, 2), (1.0, 1.0)), Curve((1, 2), (1.0, 1.0)), (1.0, 0.0, 0.0, 0.0))
"""Prices nothing: there are no other requests in a benchmark's step."""


def waterfall_of(result: Any, path: Path) -> Waterfall:
    """Raises UsageError if the file is no result of `bench decode`."""
    try:
        seconds = result["class_seconds"]["1"]
        classes = np.array([seconds[name] for name in OP_CLASSES])
        step = float(result["step_seconds"]["1"])
        weight_bytes, read = float(result["packed_bytes_per_token"]), float(result["read_gb_s"]) * 1e9
        limits = Limits(
            weight_bytes / read, result["bytes_per_token"] / weight_bytes, weight_bytes, result["class_bytes"]
        )
        kv_bytes = int(result["kv_bytes"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: is no result of bench decode with one row (it lacks {error})") from error
    kernels = float(classes.sum())
    span = SpanRecord(0, "decode", int(result["context"]), 1, 1, 1)
    shape = StepShape(1, 1, kv_bytes, int(result["context"]) + 1)
    record = StepRecord(0.0, 0.0, 0.0, 0.0, max(step - kernels, 0.0), 0.0, kernels, classes, 0.0, shape, (span,))
    return split([record], 0, step, limits, _ALONE, CacheSpec(()), OP_CLASSES)
