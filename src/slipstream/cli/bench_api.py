"""slipstream bench structured and restart: what schemas cost, and what a known beginning is worth after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from slipstream.cli.bench import Out, report
from slipstream.cli.commands import Option
from slipstream.cli.options import (
    JsonOption,
    MaxModelLen,
    ModelArgument,
    Quantization,
    Speculation,
    Threads,
    load_options,
    open_drafted,
    progress_bar,
    table,
)
from slipstream.errors import UsageError


def structured(
    model: ModelArgument,
    count: Annotated[int, Option("--schemas", help="Schemas, made at random.")] = 300,
    seed: Annotated[int, Option()] = 0,
    bombs: Annotated[bool, Option("--bombs", help="Schemas made to hurt instead, each beside a stream.")] = False,
    turns: Annotated[int, Option(help="With --bombs: times each.")] = 3,
    speculative: Speculation = "auto",
    json_output: JsonOption = False,
    out: Out = None,
    max_model_len: MaxModelLen = None,
    quantization: Quantization = "none",
    threads: Threads = None,
) -> None:
    """Whether answers keep to many schemas, and at what share of the speed of free answers."""
    from slipstream.bench.structured import measure
    from slipstream.engine.cost import cost_model

    if count < 1 or turns < 1:
        raise UsageError("--schemas and --turns must be positive")
    options = load_options(max_model_len or 2048, "bf16", quantization, threads, "native")
    if bombs:
        served = ["--speculative", speculative, *_served(max_model_len, quantization, threads)]
        _bombs(model, served, turns, json_output, out)
        return
    found = open_drafted(model, options, speculative, "exact", quick=False)
    loaded, cost = found.model, found.cost or cost_model(found.model)
    with progress_bar() as bar:
        result = measure(loaded, cost, found.controller, count, seed, lambda n: bar("answering", n, count))
    result = {"model": model, "speculative": speculative, **result}
    report(result, json_output, out)
    if not json_output:
        speed, compiled = result["speed"], result["compile_seconds"]
        print(
            f"{result['whole']} of {result['schemas']} answers ended by themselves, {result['valid']:.1%} valid; "
            f"{speed['median']:.3f} of the free speed (schemas {speed['min']:.2f}-{speed['max']:.2f}; of all tokens "
            f"{result['overall_speed']:.3f}), compiled in "
            f"{compiled['median'] * 1e3:.1f} ms (at most {compiled['max'] * 1e3:.0f})"
        )


def _served(max_model_len: int | None, quantization: str, threads: int | None) -> list[str]:
    """Flags of a server that runs as these options say."""
    length = ["--max-model-len", str(max_model_len)] if max_model_len else []
    return ["--quantization", quantization, *length, *(["--threads", str(threads)] if threads else [])]


def _bombs(model: str, options: list[str], turns: int, json_output: bool, out: Path | None) -> None:
    from slipstream.bench.bombs import measure

    with progress_bar() as bar:
        result = measure(model, options, turns, lambda n, of: bar("schemas beside a stream", n, of))
    report({"model": model, **result}, json_output, out)
    if not json_output:
        rows = [
            (name, str(v["status"]), f"{v['seconds']['median'] * 1e3:.0f}", f"{v['tpot']['median']:.2f}")
            for name, v in result["bombs"].items()
        ]
        table("schemas made to hurt, each beside a stream", rows, ("schema", "status", "ms", "TPOT over that alone"))


def restart(
    model: ModelArgument,
    prompt: Annotated[int, Option(help="Tokens of the prompt.")] = 2000,
    turns: Annotated[int, Option(help="Turns of a cold start and one that knows the prompt.")] = 7,
    json_output: JsonOption = False,
    out: Out = None,
    quantization: Quantization = "none",
    threads: Threads = None,
) -> None:
    """The time to the first token of a prompt that a server knew before it was restarted, over that of a cold one."""
    from slipstream.bench.restart import measure

    if prompt < 64 or turns < 1:
        raise UsageError("--prompt is at least 64, --turns at least 1")
    load_options(None, "bf16", quantization, threads, "native")  # says what is wrong before a server does
    options = _served(None, quantization, threads)
    with progress_bar() as bar:
        result = measure(model, options, prompt, turns, lambda n: bar("turns of two servers", n, turns))
    result = {"model": model, **result}
    report(result, json_output, out)
    if not json_output:
        cold, known = result["cold_seconds"]["median"], result["known_seconds"]["median"]
        print(
            f"{prompt} tokens: first token after {known * 1e3:.0f} ms where the prompt was known before the restart, "
            f"{cold * 1e3:.0f} ms cold: {result['restart']['median']:.3f} times; {result['stored_bytes'] / 1e6:.0f} MB"
        )
