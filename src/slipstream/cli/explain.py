"""slipstream explain: the waterfall from the ceiling to what the user got."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from slipstream.cli.commands import Option
from slipstream.cli.options import (
    JsonOption,
    KvCacheDtype,
    MaxModelLen,
    ModelArgument,
    Quantization,
    Threads,
    load_options,
    progress_bar,
    table,
)
from slipstream.errors import UsageError
from slipstream.roofline.waterfall import Waterfall

PROMPT = "Write a short story about a lighthouse keeper who discovers an old map."


def explain(
    model: ModelArgument,
    prompt: Annotated[str, Option("-p", "--prompt")] = PROMPT,
    max_tokens: Annotated[int, Option("--max-tokens")] = 128,
    others: Annotated[int, Option(help="Other requests that decode meanwhile.")] = 0,
    foreign_prompt: Annotated[
        int, Option("--foreign-prompt", help="Other users' prompts of this length, one after another.")
    ] = 0,
    self_test: Annotated[bool, Option("--self-test", help="Inject known losses and see whom it blames.")] = False,
    plot: Annotated[Path | None, Option(help="Also draw waterfall and roofline into this SVG file.")] = None,
    prometheus: Annotated[bool, Option("--prometheus", help="Print Prometheus series instead.")] = False,
    json_output: JsonOption = False,
    out: Annotated[Path | None, Option("--out", help="Also write the JSON to this file.")] = None,
    max_model_len: MaxModelLen = None,
    kv_cache_dtype: KvCacheDtype = "bf16",
    quantization: Quantization = "none",
    threads: Threads = None,
) -> None:
    """Run a generation and say, in seconds per token that add up, where the time went.

    MODEL may also be the address of a running server, or a JSON file that `bench decode --out` wrote.
    """
    path = Path(model)
    if model.startswith(("http://", "https://")):
        report = _live(model)
    elif path.suffix == ".json" and path.is_file():
        report = _recorded(path)
    else:
        if max_tokens < 16 or others < 0 or foreign_prompt < 0:
            raise UsageError("--max-tokens must be at least 16, --others and --foreign-prompt at least 0")
        options = load_options(max_model_len, kv_cache_dtype, quantization, threads, "native")
        if self_test:
            _self_test(model, options, prompt, json_output, out)
            return
        report = _measured(model, options, prompt, max_tokens, others, foreign_prompt)
    waterfall: Waterfall = report.pop("waterfall")
    if plot is not None:
        _plot(plot, waterfall, report)
    full = {**waterfall.facts(), **report}
    if out is not None:
        from slipstream.bench.machine import save

        save(full, out)
    if prometheus:
        from slipstream.roofline.waterfall import prometheus as series

        print(series(waterfall, {"model": str(report["model"])}), end="")
    elif json_output:
        print(json.dumps(full))
    else:
        _show(waterfall, report)


def _measured(
    model: str, options: Any, prompt: str, max_tokens: int, others: int, foreign_prompt: int
) -> dict[str, Any]:
    from dataclasses import replace

    from slipstream.bench.machine import described
    from slipstream.engine import Engine, load_model
    from slipstream.engine.cost import cost_model
    from slipstream.engine.explain import Load, check_bytes, native_executable
    from slipstream.engine.explain import explain as run
    from slipstream.kernels.native import _native
    from slipstream.program.sampling import SamplingParams

    with progress_bar() as bar:
        loaded = load_model(model, replace(options, sequences=max(options.sequences, others + 2)), bar)
        cost = cost_model(loaded, lambda i, n: bar("fitting the cost model", i, n))
        engine = Engine(loaded, cost)
        params = SamplingParams(temperature=0.7, seed=1, max_tokens=max_tokens, ignore_eos=True)
        tokens = loaded.tokenizer.encode(prompt)
        result = run(
            engine, tokens, params, Load(others, foreign_prompt), lambda e, n: bar("explaining", n, max_tokens)
        )
    accounts = engine.accounting
    nbytes, done = accounts.work_of(result.records)
    return described(
        {
            "model": model,
            "others": others,
            "foreign_prompt": foreign_prompt,
            "waterfall": result.waterfall,
            "first_token_seconds": result.first_token_seconds,
            "own_prefill_seconds": result.own_prefill_seconds,
            "read_gb_s": result.limits.bandwidth / 1e9,
            "bytes_by_class": accounts.bytes_by_class(),
            "operations_by_class": accounts.operations_by_class(),
            "seconds_by_class": accounts.seconds_by_class(),
            "rows": dict(accounts.totals.rows),
            "counters": check_bytes(engine),
            "knee_rows": engine.cost.knee if engine.cost else None,
            "cost_model": asdict(engine.cost) if engine.cost else None,
            "peak_ops": _native.peak_ops("int8", native_executable(loaded).threads, 0.05),
            "intensity": done / nbytes,
            "ops": done / sum(record.seconds for record in result.records),
        }
    )


def _live(address: str) -> dict[str, Any]:
    """What a server says of its latest traffic; SLIPSTREAM_API_KEY is shown to it."""
    import os
    import urllib.error
    import urllib.request

    from slipstream.roofline.waterfall import Part

    request = urllib.request.Request(address.rstrip("/") + "/explain")
    if key := os.environ.get("SLIPSTREAM_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            found = json.loads(answer.read())
        parts = tuple(Part(str(name), float(seconds)) for name, seconds in found["parts"].items())
        waterfall = Waterfall(float(found["seconds_per_token"]), parts, int(found["tokens"]), int(found["steps"]))
    except urllib.error.HTTPError as error:
        detail = error.read().decode(errors="replace")[:300]
        raise UsageError(f"{address}: {error.code} {error.reason}: {detail}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{address}: is no Slipstream server that answers ({error})") from error
    return {"waterfall": waterfall, "model": found["model"], "requests": found.get("requests"), "source": address}


def _recorded(path: Path) -> dict[str, Any]:
    from slipstream.bench.explain import waterfall_of

    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    return {"waterfall": waterfall_of(result, path), "model": result["model"], "source": str(path)}


def _show(waterfall: Waterfall, report: dict[str, Any]) -> None:
    rows = []
    at = 0.0
    for part in waterfall.parts:
        at += part.seconds
        rows.append(
            (part.name, f"{part.seconds * 1e6:.1f}", f"{part.seconds / waterfall.seconds:.1%}", f"{1 / at:.1f}")
        )
    table(
        f"{report['model']}: {waterfall.tok_s:.1f} of {1 / waterfall.ceiling:.1f} tokens/s",
        rows,
        ("part", "µs per token", "share", "tokens/s so far"),
    )
    if "first_token_seconds" in report:
        own, first = report["own_prefill_seconds"], report["first_token_seconds"]
        print(f"First token after {first * 1e3:.0f} ms, {own * 1e3:.0f} ms of it in steps with its own prompt.")
    counters = report.get("counters", {})
    if counters.get("counted_bytes") is not None:
        off = counters["counted_bytes"] / counters["accounted_bytes"] - 1
        print(f"Bytes by the hardware's counters: {off:+.1%} of those accounted for.")
    elif counters:
        print(f"Bytes are not checked against hardware counters: {counters['reason']}.")
    if report.get("knee_rows"):
        print(f"The knee of this model here: {report['knee_rows']} rows.")
    print(waterfall.verdict())


def _plot(path: Path, waterfall: Waterfall, report: dict[str, Any]) -> None:
    from slipstream.roofline.figure import RooflinePoint, draw

    point = None
    if "peak_ops" in report:
        point = RooflinePoint(report["intensity"], report["ops"], report["read_gb_s"] * 1e9, report["peak_ops"])
    title = f"{report['model']}: {waterfall.tok_s:.1f} of {1 / waterfall.ceiling:.1f} tokens/s"
    try:
        path.write_text(draw(waterfall, title, point), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--plot: {error}") from error


def _self_test(model: str, options: Any, prompt: str, json_output: bool, out: Path | None) -> None:
    from slipstream.bench.machine import described, save
    from slipstream.engine import load_model
    from slipstream.engine.cost import cost_model
    from slipstream.engine.self_test import self_test as run

    with progress_bar() as bar:
        loaded = load_model(model, options, bar)
        cost = cost_model(loaded, lambda i, n: bar("fitting the cost model", i, n))
        tokens = loaded.tokenizer.encode(prompt)
        verdicts = run(loaded, cost, tokens, lambda i, n: bar("injecting losses", i, n))
    report = described({"model": model, "self_test": [asdict(v) | {"passed": v.passed} for v in verdicts]})
    if out is not None:
        save(report, out)
    if json_output:
        print(json.dumps(report))
        return
    table(
        f"{model}: losses injected and blamed, µs per token",
        [
            (
                v.part,
                f"{v.injected * 1e6:.0f}",
                f"{v.blamed * 1e6:.0f} ({v.blamed / v.injected:.0%})",
                f"{v.other}: {v.other_seconds * 1e6:.0f}",
                "passed" if v.passed else "FAILED",
            )
            for v in verdicts
        ],
        ("part", "injected", "blamed", "grew most besides", ""),
    )
