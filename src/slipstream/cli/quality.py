"""slipstream quality: what a model's precision costs, against its own weights in float32."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from slipstream.cli.commands import Option
from slipstream.cli.options import (
    JsonOption,
    KvCacheDtype,
    ModelArgument,
    Quantization,
    Threads,
    load_options,
    progress_bar,
    table,
)
from slipstream.errors import UsageError


def quality(
    model: ModelArgument,
    text: Annotated[Path, Option("--text", help="A text file to read; a few pages are enough.")],
    tokens: Annotated[int, Option(help="Tokens of it to use.")] = 2000,
    context: Annotated[int, Option(help="Read in pieces of this length.")] = 512,
    reference: Annotated[
        str, Option(help="float32 by our numpy backend, or by transformers (if installed).")
    ] = "numpy",
    json_output: JsonOption = False,
    out: Annotated[Path | None, Option("--out", help="Also write the JSON to this file.")] = None,
    kv_cache_dtype: KvCacheDtype = "bf16",
    quantization: Quantization = "none",
    threads: Threads = None,
) -> None:
    """Mean KL divergence and top-1 agreement of the native backend with float32 on the dequantised weights."""
    from slipstream.bench.machine import described, native_only, save
    from slipstream.engine import load_model
    from slipstream.kernels.native.executable import ACTIVATION_RULE
    from slipstream.precision import compare, scores_of
    from slipstream.precision.oracle import transformers_scores
    from slipstream.weights.references import resolve

    if tokens < 2 or context < 2:
        raise UsageError("--tokens and --context must be at least 2")
    if reference not in ("numpy", "transformers"):
        raise UsageError(f"--reference is numpy or transformers, not {reference!r}")
    options = replace(load_options(context, kv_cache_dtype, quantization, threads, "native"), sequences=1)
    with progress_bar() as bar:
        ours = load_model(model, options, bar)
        if reference == "transformers":
            theirs = transformers_scores(resolve(model))
        else:
            theirs = scores_of(load_model(model, replace(options, backend="reference"), bar).executable)
        try:
            ids = ours.tokenizer.encode(text.read_text(encoding="utf-8"))[:tokens]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--text: {error}") from error
        if len(ids) < 2:
            raise UsageError("--text: the file has fewer than two tokens")
        result = compare(scores_of(ours.executable), theirs, ids, context, lambda i, n: bar("comparing", i, n))
    report = described(
        {
            "model": model,
            "kv_cache_dtype": kv_cache_dtype,
            "quantization": quantization,
            "activations": ACTIVATION_RULE,
            "numerics": native_only(ours.executable).numerics,
            "context": context,
            "reference": reference,
            **asdict(result),
        }
    )
    if out is not None:
        save(report, out)
    if json_output:
        print(json.dumps(report))
        return
    table(
        f"{model}: activations {ACTIVATION_RULE}, keys and values {kv_cache_dtype}",
        [
            ("tokens", str(result.tokens)),
            (f"mean KL to float32 by {reference}", f"{result.mean_kl:.5f}"),
            ("top-1 agreement", f"{result.top1_agreement:.2%}"),
            ("perplexity", f"{result.perplexity:.3f}"),
            ("perplexity in float32", f"{result.reference_perplexity:.3f}"),
        ],
    )
