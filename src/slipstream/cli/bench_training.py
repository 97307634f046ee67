"""slipstream bench idle-training: what a drafter's training beside a server costs whoever is served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from slipstream.cli.bench import Out, report
from slipstream.cli.commands import Option
from slipstream.cli.options import JsonOption, ModelArgument, progress_bar, table
from slipstream.errors import UsageError


def idle_training(
    model: ModelArgument,
    traffic: Annotated[Path, Option("--traffic", help="A traffic file to train on, as serve --record writes.")],
    requests: Annotated[int, Option(help="Requests of a turn, one after the other.")] = 6,
    turns: Annotated[int, Option(help="Turns with a training, and as many without.")] = 4,
    pause: Annotated[float, Option(help="Seconds of quiet before a request: the training runs again after 3.")] = 6.0,
    prompt: Annotated[int, Option(help="Tokens of each prompt.")] = 128,
    answer: Annotated[int, Option(help="Tokens of each answer.")] = 128,
    json_output: JsonOption = False,
    out: Out = None,
) -> None:
    """Time to the first token and of each further one, with a training in idle time beside the server and without."""
    from slipstream.bench.idle_training import measure
    from slipstream.training.idle import QUIET

    if min(requests, turns, prompt) < 1 or answer < 2:
        raise UsageError("--requests, --turns and --prompt must be positive, --answer at least 2")
    if pause <= QUIET:
        raise UsageError(f"--pause must be more than {QUIET:g}: no training goes on before")
    with progress_bar() as bar:
        result = measure(model, traffic, [], requests, turns, pause, QUIET, prompt, answer, bar)
    report(result, json_output, out)
    if json_output:
        return
    rows = []
    for name in ("ttft", "tpot"):
        ratio, beside, without = result["idle_training"][name], result["with_it"][name], result["without"][name]
        rows.append(
            (
                f"{name.upper()} ms, median / p99",
                f"{beside['median'] * 1e3:.1f} / {beside['p99'] * 1e3:.1f}",
                f"{without['median'] * 1e3:.1f} / {without['p99'] * 1e3:.1f}",
                f"{ratio['median']:.3f} ({ratio['min']:.3f}-{ratio['max']:.3f})",
            )
        )
    title = f"{model}, {result['trained_seconds']['with_it']:.0f} s of training in its idle time"
    table(title, rows, ("", "with it", "without", "ratio (turns)"))
