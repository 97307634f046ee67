"""slipstream bench: decode and prefill against the ceiling, start, peers, and the table of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from slipstream.cli.commands import Argument, Option
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

Turns = Annotated[int, Option(help="Interleaved turns; figures are medians over them.")]
Out = Annotated[Path | None, Option("--out", help="Also write the JSON to this file.")]


def decode(
    model: ModelArgument,
    rows: Annotated[str, Option(help="Sequences that decode together, comma-separated.")] = "1,2,4,8,16",
    context: Annotated[int, Option(help="Tokens already in the cache of each sequence.")] = 64,
    turns: Turns = 9,
    temperature: Annotated[float, Option()] = 0.7,
    json_output: JsonOption = False,
    out: Out = None,
    kv_cache_dtype: KvCacheDtype = "bf16",
    quantization: Quantization = "none",
    threads: Threads = None,
) -> None:
    """Whole decode steps, sampling included, between pure reads of the model's own packed bytes."""
    from dataclasses import replace

    from slipstream.bench.decode import measure
    from slipstream.engine import load_model
    from slipstream.program.sampling import SamplingParams

    counts = counts_of(rows)
    if turns < 5 or context < 0:
        raise UsageError("--turns must be at least 5, --context at least 0")
    options = load_options(context + 2, kv_cache_dtype, quantization, threads, "native")
    with progress_bar() as bar:
        loaded = load_model(model, replace(options, sequences=max(counts)), bar)
        params = SamplingParams(temperature=temperature)
        result = measure(loaded, counts, context, turns, params, lambda i, n: bar("measuring", i, n))
    report(result, json_output, out)
    if not json_output:
        _decode_table(result)


def prefill(
    model: ModelArgument,
    tokens: Annotated[int, Option(help="Length of the prompt.")] = 1024,
    turns: Turns = 5,
    json_output: JsonOption = False,
    out: Out = None,
    kv_cache_dtype: KvCacheDtype = "bf16",
    quantization: Quantization = "none",
    threads: Threads = None,
) -> None:
    """Prompt processing, beside the peak of the same arithmetic in registers."""
    from slipstream.bench.prefill import measure
    from slipstream.engine import load_model

    if turns < 1 or tokens < 1:
        raise UsageError("--turns and --tokens must be positive")
    options = load_options(tokens + 1, kv_cache_dtype, quantization, threads, "native")
    with progress_bar() as bar:
        loaded = load_model(model, options, bar)
        result = measure(loaded, tokens, turns, lambda i, n: bar("measuring", i, n))
    report(result, json_output, out)
    if not json_output:
        rows = [
            ("tokens/s", f"{result['tok_s']:.0f}"),
            ("achieved", f"{result['ops'] / 1e12:.3f} TOP/s"),
            ("peak in registers", f"{result['peak_ops'] / 1e12:.3f} TOP/s"),
            ("share of the peak", f"{result['fraction_of_peak']:.0%}"),
        ]
        table(f"prefill of {tokens} tokens, {result['model']}, {result['isa']}", rows)


def cost(
    model: ModelArgument,
    json_output: JsonOption = False,
    out: Out = None,
    max_model_len: MaxModelLen = None,
    kv_cache_dtype: KvCacheDtype = "bf16",
    quantization: Quantization = "none",
    threads: Threads = None,
) -> None:
    """Fit the cost model, then predict and measure steps it was not fitted to."""
    from slipstream.bench.cost import measure
    from slipstream.engine import load_model

    options = load_options(max_model_len, kv_cache_dtype, quantization, threads, "native")
    with progress_bar() as bar:
        loaded = load_model(model, options, bar)
        result = measure(loaded, lambda i, n: bar("measuring", i, n))
    report(result, json_output, out)
    if not json_output:
        table(
            f"cost of steps, {model}: median error {result['median_error']:.1%}, knee {result['knee_rows']} rows",
            [
                (
                    cell["step"],
                    f"{cell['predicted_seconds'] * 1e3:.2f}",
                    f"{cell['measured_seconds'] * 1e3:.2f}",
                    f"{cell['predicted_seconds'] / cell['measured_seconds'] - 1:+.1%}",
                )
                for cell in result["grid"]
            ],
            ("step", "predicted ms", "measured ms", "error"),
        )
        counts, seconds = result["cost_model"]["body"]["counts"], result["cost_model"]["body"]["seconds"]
        table(
            "the knee's curve: the body of a step by rows",
            [
                (
                    f"{n}{' (knee)' if n == result['knee_rows'] else ''}",
                    f"{s * 1e3:.2f}",
                    f"{(s - before) * 1e3 / (n - fewer):.3f}" if fewer else "",
                    f"{s * 1e3 / n:.3f}",
                )
                for n, s, fewer, before in zip(counts, seconds, [0, *counts], [0.0, *seconds], strict=False)
            ],
            ("rows", "ms", "ms for one more", "ms per row"),
        )


def start(
    model: ModelArgument,
    turns: Turns = 9,
    json_output: JsonOption = False,
    out: Out = None,
    kv_cache_dtype: KvCacheDtype = "bf16",
    threads: Threads = None,
) -> None:
    """Process start to first token, and peak memory: a first start that packs, then later ones. Installed size."""
    from slipstream.bench.installed import installed
    from slipstream.bench.start import measure
    from slipstream.weights.open import open_checkpoint
    from slipstream.weights.references import resolve

    if turns < 1:
        raise UsageError("--turns must be positive")
    with progress_bar() as bar:
        weights = open_checkpoint(resolve(model, bar)).nbytes
        options = ["--kv-cache-dtype", kv_cache_dtype, *(["--threads", str(threads)] if threads else [])]
        result = measure(model, options, turns, lambda i, n: bar("starting", i, n))
    result["weight_bytes"], result["installed"] = weights, (size := installed())
    report(result, json_output, out)
    if not json_output:
        table(
            f"start, {model}",
            [
                (
                    name,
                    f"{values['seconds']:.2f} s",
                    f"{values['peak_bytes'] / 1e6:.0f} MB",
                    f"{(values['peak_bytes'] - 150e6) / weights:.2f}",
                )
                for name, values in (("first", result["first_start"]), ("later", result["later_starts"]))
            ],
            ("start", "to first output", "peak memory", "without 150 MB, in weights"),
        )
        table(
            f"installed: {size['bytes'] / 1e6:.1f} MB in {size['packages']} packages",
            [(name, f"{count / 1e6:.1f} MB") for name, count in list(size["by_package"].items())[:5]],
            ("package", "size"),
        )


def peers(
    model: ModelArgument,
    llama_cpp: Annotated[Path, Option("--llama-cpp", help="The python of an environment with llama-cpp-python.")],
    context: Annotated[int, Option(help="Tokens in the cache when decoding.")] = 64,
    prompt: Annotated[int, Option(help="Length of the prompt for prefill.")] = 512,
    turns: Turns = 7,
    json_output: JsonOption = False,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Decode and prefill in turns with llama.cpp on the same GGUF file."""
    from dataclasses import replace

    from slipstream.bench.machine import native_only
    from slipstream.bench.peers import LlamaCpp, measure
    from slipstream.engine import load_model
    from slipstream.weights.references import resolve

    if turns < 1 or context < 1 or prompt < 1:
        raise UsageError("--turns, --context and --prompt must be positive")
    longest = max(context + 64, prompt + 1)
    with progress_bar() as bar:
        file = resolve(model, bar)
        if file.suffix != ".gguf":
            raise UsageError("llama.cpp reads GGUF files; give one")
        loaded = load_model(model, replace(load_options(longest, "bf16", "none", threads, "native"), sequences=1), bar)
        with LlamaCpp(llama_cpp, file, longest, native_only(loaded.executable).threads) as peer:
            result = measure(loaded, peer, context, prompt, turns, lambda i, n: bar("measuring", i, n))
    report(result, json_output, out)
    if not json_output:
        table(
            f"{result['model']} beside {result['peer']}",
            [
                (
                    f"decode at context {context}",
                    f"{result['decode_tok_s']:.1f}",
                    f"{result['peer_decode_tok_s']:.1f}",
                    f"{result['decode_ratio']:.2f}",
                ),
                (
                    "share of the ceiling",
                    f"{result['fraction_of_ceiling']:.0%}",
                    f"{result['peer_fraction_of_ceiling']:.0%}",
                    "",
                ),
                (
                    f"prefill of {prompt}",
                    f"{result['prefill_tok_s']:.0f}",
                    f"{result['peer_prefill_tok_s']:.0f}",
                    f"{result['prefill_ratio']:.2f}",
                ),
            ],
            ("tokens/s", "ours", "theirs", "ratio"),
        )


def host(
    model: ModelArgument,
    sequences: Annotated[str, Option(help="Sequences that decode together, comma-separated.")] = "1,16,64",
    turns: Annotated[int, Option(help="Turns beside a process that keeps a core busy.")] = 5,
    json_output: JsonOption = False,
    out: Out = None,
    kv_cache_dtype: KvCacheDtype = "bf16",
    quantization: Quantization = "none",
    threads: Threads = None,
) -> None:
    """What a step costs outside its kernels, planned after the one before or while it runs; and beside a busy core."""
    from dataclasses import replace

    from slipstream.bench.host import measure
    from slipstream.engine import load_model

    counts = counts_of(sequences)
    if turns < 1:
        raise UsageError("--turns must be positive")
    options = replace(load_options(512, kv_cache_dtype, quantization, threads, "native"), sequences=max(counts))
    with progress_bar() as bar:
        result = measure(load_model(model, options, bar), counts, turns, lambda done, all: bar("steps", done, all))
    report(result, json_output, out)
    if json_output:
        return
    table(
        f"a step of {model} outside its kernels, µs",
        [
            (n, mode, str(result["threads"][mode]), *(f"{r[part]:.0f}" for part in _HOST), f"{r['tok_s']:.0f}")
            for n, modes in result["host"].items()
            for mode, r in modes.items()
        ],
        ("n", "planned", "threads", "outside", *_HOST[1:], "tokens/s"),
    )
    busy = result["busy"]
    print(
        f"Beside a process that keeps a core busy: {busy['adapting']:.0f} tokens/s of {busy['alone']:.0f}; "
        f"{busy['all_threads']:.0f} if all threads shared the cores with it."
    )


_HOST = ("outside_kernels", "scheduling", "dispatch", "output", "hidden", "step")


def results(
    folder: Annotated[Path, Argument(help="A folder with recorded JSON results.")],
) -> None:
    """Print recorded results as a Markdown table."""
    from slipstream.bench.table import results_table

    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    print(results_table(folder))


def counts_of(text: str) -> list[int]:
    """Numbers of rows or streams. Raises UsageError."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or not all(1 <= count <= 512 for count in counts):
        raise UsageError(f"--rows takes numbers from 1 to 512 with commas, not {text!r}")
    return counts


def report(result: dict[str, Any], json_output: bool, out: Path | None) -> None:
    """Save a result with the command that made it, and print it as JSON if that is wanted."""
    from slipstream.bench.machine import described, save

    full = described(result)
    if out is not None:
        save(full, out)
    if json_output:
        print(json.dumps(full))


def _decode_table(result: dict[str, Any]) -> None:
    table(
        f"decode, {result['model']}, context {result['context']}, {result['isa']}",
        [
            ("tokens/s at one row", f"{result['tok_s']:.1f}"),
            ("bytes per token, file", f"{result['file_bytes_per_token'] / 1e6:.1f} MB"),
            ("bytes per token, packed", f"{result['packed_bytes_per_token'] / 1e6:.1f} MB"),
            ("pure read", f"{result['read_gb_s']:.1f} GB/s"),
            ("ceiling", f"{result['ceiling_tok_s']:.1f} tokens/s"),
            ("share of the ceiling", f"{result['fraction_of_ceiling']:.0%}"),
        ],
    )
    table(
        "step time by rows",
        [
            (n, f"{seconds * 1e3:.2f} ms", f"{result['step_ratio'][n]:.2f}")
            for n, seconds in result["step_seconds"].items()
        ],
        ("rows", "step", "over one row"),
    )
