"""The cost model against steps it was not fitted to: decodes of 1 to 16 rows at contexts up to 4096, and chunks."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from slipstream.bench.machine import native_only, spread
from slipstream.engine import Model
from slipstream.engine.cost import chunk_step, commit, decode_step, fit_cost, observe
from slipstream.program import Rows, StepShape
from slipstream.roofline.cost import OnlineCost

Progress = Callable[[int, int], None]
ROWS = (1, 2, 4, 8, 16)
CONTEXTS = (128, 512, 1024, 2048, 4096)
RANDOM_SHAPES, REPEATS = 24, 9


def measure(model: Model, progress: Progress | None = None) -> dict[str, Any]:
    """Fit, then predict and measure a grid and random shapes, in random order. Keys: median_error, p90_error, grid, …

    As in an engine, the model follows the steps that are run: a shape is predicted before it is measured, and learnt
    from afterwards. `fit_median_error` is that of the fit alone, which a machine whose speed drifts leaves behind.
    """
    executable = native_only(model.executable)
    fitted = fit_cost(model)
    online = OnlineCost(fitted)
    rng = random.Random(0)
    longest = model.max_len - 2
    cells: list[tuple[str, Rows]] = [
        (f"{rows} rows at {context}", decode_step(model, rows, context))
        for rows in ROWS
        for context in CONTEXTS
        if context <= longest and rows <= model.max_rows
    ]
    for _ in range(RANDOM_SHAPES):
        if rng.random() < 0.3:
            rows, context = rng.randint(8, min(256, model.max_rows)), rng.randint(0, longest // 2)
            cells.append((f"a chunk of {rows} at {context}", chunk_step(model, rows, context)))
        else:
            rows, context = rng.randint(1, 16), rng.randint(1, longest)
            cells.append((f"{rows} rows at {context}", decode_step(model, rows, context)))
    rng.shuffle(cells)
    commit(model, [step for _, step in cells])
    grid: list[dict[str, Any]] = []
    errors: list[float] = []
    fit_errors: list[float] = []
    for index, (name, step) in enumerate(cells):
        shape = StepShape.of(step, model.cache)
        predicted = online.model.seconds(shape)
        seen = sorted((observe(model, step) for _ in range(REPEATS)), key=lambda o: o.seconds)
        measured = seen[REPEATS // 2].seconds
        for observation in seen:
            online.observe(observation)
        fit_errors.append(abs(fitted.seconds(shape) / measured - 1))
        errors.append(abs(predicted / measured - 1))
        grid.append({"step": name, "predicted_seconds": predicted, "measured_seconds": measured})
        if progress:
            progress(index + 1, len(cells))
    cost = online.model
    return {
        "model": model.reference,
        "threads": executable.threads,
        "isa": executable.isa,
        "median_error": statistics.median(errors),
        "fit_median_error": statistics.median(fit_errors),
        "p90_error": sorted(errors)[int(0.9 * len(errors))],
        "knee_rows": cost.knee,
        "marginal_row_seconds": {str(n): cost.marginal_row(n) for n in ROWS},
        "marginal_logit_row_seconds": cost.marginal_logit_row(1),
        "marginal_kv_token_seconds": cost.marginal_kv_token(model.cache.bytes_per_token),
        "cost_model": asdict(cost),
        "grid": grid,
        "spread": {"error": spread(errors)},
    }
