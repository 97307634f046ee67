"""slipstream bench serve and replay: a server measured through HTTP, alone, beside another, under a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from slipstream.cli.bench import Out, counts_of, report
from slipstream.cli.commands import Option
from slipstream.cli.options import (
    JsonOption,
    KvCacheDtype,
    MaxModelLen,
    ModelArgument,
    Quantization,
    Speculation,
    Threads,
    load_options,
    progress_bar,
    table,
)
from slipstream.errors import UsageError


def serve(
    model: ModelArgument,
    streams: Annotated[str, Option(help="Streams side by side, comma-separated.")] = "1,16,64",
    prompt: Annotated[int, Option(help="Tokens of each prompt.")] = 128,
    answer: Annotated[int, Option(help="Tokens of each answer.")] = 128,
    beside: Annotated[
        str | None, Option(help="Address of another server with the same model: throughput of both, in turns.")
    ] = None,
    precision_beside: Annotated[
        str, Option("--precision-beside", help="What the other one serves, for the record.")
    ] = "not named",
    json_output: JsonOption = False,
    out: Out = None,
    max_model_len: MaxModelLen = None,
    kv_cache_dtype: KvCacheDtype = "bf16",
    quantization: Quantization = "none",
    threads: Threads = None,
    speculative: Speculation = "auto",
) -> None:
    """Start a server and measure it through HTTP: throughput, latencies, a long prompt among them, cached prefixes."""
    from slipstream.bench.serve import measure

    counts = counts_of(streams)
    if prompt < 1 or answer < 2:
        raise UsageError("--prompt must be positive, --answer at least 2")
    if beside is not None:
        options = _server_options(max_model_len, kv_cache_dtype, quantization, threads, speculative)
        _serve_beside(model, options, beside, precision_beside, counts, prompt, answer, json_output, out)
        return
    options = _server_options(max_model_len, kv_cache_dtype, quantization, threads, speculative)
    with progress_bar() as bar:
        result = measure(model, options, counts, prompt, answer, bar)
    report(result, json_output, out)
    if json_output:
        return
    table(
        f"serving {model}, {prompt} tokens in, {answer} out",
        [
            (
                n,
                f"{s['output_tok_s']:.0f}",
                f"{s['ttft']['median'] * 1e3:.0f} / {s['ttft']['p99'] * 1e3:.0f}",
                f"{s['tpot']['median'] * 1e3:.1f} / {s['tpot']['p99'] * 1e3:.1f}",
                f"{s['gap']['p99'] * 1e3:.1f}",
                f"{s['host_us']['outside_kernels']:.0f} / {s['host_us']['server_us_a_token']:.0f}",
            )
            for n, s in result["serve_streams"].items()
        ],
        (
            "streams",
            "tokens/s",
            "TTFT ms, median / p99",
            "TPOT ms, median / p99",
            "gap p99 ms",
            "host µs: engine a step / server a token",
        ),
    )
    between, prefix, idle = result["interference"], result["prefix"], result["idle"]
    touched = result["api_under_load"]
    half, kept, one = result["half_load"], result["half_load_with_target"], result["one_stream"]
    print(
        f"At half of the most it can do: TPOT p99 {half['tpot']['p99'] * 1e3:.1f} ms "
        f"({half['p99_tpot_over_alone']:.2f} times a lone stream's), TTFT p99 {half['ttft']['p99'] * 1e3:.0f} ms; with "
        f"--tpot-target {kept['tpot_target']:.4f}: {kept['tpot']['p99'] * 1e3:.1f} ms "
        f"({kept['p99_tpot_over_alone']:.2f} times), TTFT p99 {kept['ttft']['p99'] * 1e3:.0f} ms.\n"
        f"One stream: {one['http_tok_s']:.0f} tokens/s through HTTP, {one['in_process_tok_s']:.0f} in process "
        f"({one['ratio']:.2f} times).\n"
        f"A prompt of {between['prompt']} tokens among 4 streams: gap p99 {between['gap_p99_alone'] * 1e3:.1f} -> "
        f"{between['gap_p99_beside'] * 1e3:.1f} ms ({between['ratio']:.2f} times); its first token after "
        f"{between['long_prompt_ttft']:.2f} s.\n"
        f"A prompt of {prefix['prompt']} tokens again: TTFT {prefix['cold_ttft'] * 1e3:.0f} -> "
        f"{prefix['warm_ttft'] * 1e3:.0f} ms ({prefix['ratio']:.3f} times).\n"
        f"/v1/models under the last load: {touched['median'] * 1e3:.1f} ms (p99 {touched['p99'] * 1e3:.1f}).\n"
        f"Idle: {idle['cpu']:.1%} of a core; {idle['resident_bytes'] / 1e6:.0f} MB at start, "
        f"{idle['beyond_weights_bytes'] / 1e6:.0f} beyond the weights."
    )


def _serve_beside(
    model: str,
    options: list[str],
    url: str,
    precision: str,
    counts: list[int],
    prompt: int,
    answer: int,
    json_output: bool,
    out: Path | None,
) -> None:
    from slipstream.bench.beside import beside
    from slipstream.bench.load import Endpoint

    with progress_bar() as bar:
        result = beside(model, options, Endpoint.of(url), counts, prompt, answer, bar) | {"peer_precision": precision}
    report(result, json_output, out)
    if json_output:
        return
    table(
        f"{model} beside {result['peer_model']} ({precision}), {prompt} tokens in, {answer} out",
        [
            (
                n,
                f"{r['ours']['output_tok_s']:.0f} / {r['theirs']['output_tok_s']:.0f}",
                f"{r['ratio']:.2f}",
                f"{r['ours']['ttft']['median'] * 1e3:.0f} / {r['theirs']['ttft']['median'] * 1e3:.0f}",
                f"{r['ours']['tpot']['median'] * 1e3:.1f} / {r['theirs']['tpot']['median'] * 1e3:.1f}",
            )
            for n, r in result["beside"].items()
        ],
        ("streams", "tokens/s, ours / theirs", "ratio", "TTFT ms, ours / theirs", "TPOT ms, ours / theirs"),
    )


def replay_trace(
    model: ModelArgument,
    trace: Annotated[Path, Option(help="An Azure (CSV) or Mooncake (JSONL) trace.")],
    requests: Annotated[int, Option(help="How many of its requests.")] = 300,
    scale: Annotated[float, Option(help="Lengths are multiplied with it.")] = 0.125,
    load: Annotated[float, Option(help="Share of what the machine can do at most.")] = 0.7,
    slo_ttft: Annotated[float, Option("--slo-ttft", help="Seconds to a good first token.")] = 1.0,
    slo_tpot: Annotated[float, Option("--slo-tpot", help="Seconds a good token takes.")] = 0.05,
    json_output: JsonOption = False,
    out: Out = None,
    max_model_len: MaxModelLen = None,
    kv_cache_dtype: KvCacheDtype = "bf16",
    quantization: Quantization = "none",
    threads: Threads = None,
    speculative: Speculation = "auto",
) -> None:
    """Replay a trace of real traffic against a server: goodput, latencies, and what the prefix cache found."""
    from slipstream.bench.replay import replay
    from slipstream.bench.serve import VOCABULARY
    from slipstream.bench.trace import read_trace

    for name, value in (("--requests", requests), ("--scale", scale), ("--load", load)):
        if not value > 0:
            raise UsageError(f"{name} must be positive")
    options = _server_options(max_model_len, kv_cache_dtype, quantization, threads, speculative)
    arrivals = read_trace(trace, requests, scale, max_model_len or 4096, VOCABULARY)
    with progress_bar() as bar:
        result = replay(model, options, arrivals, load, slo_ttft, slo_tpot, bar) | {"trace": trace.name}
    report(result, json_output, out)
    if json_output:
        return
    infinite = result["hits_of_infinite"]
    table(
        f"{result['requests']} requests of {trace.name}, {result['mean_prompt']:.0f} tokens in and "
        f"{result['mean_answer']:.0f} out on average, {result['rate']:.2f} a second",
        [
            ("goodput", f"{result['goodput']:.2f} requests/s ({result['good_share']:.0%} of them good)"),
            ("output", f"{result['output_tok_s']:.0f} tokens/s"),
            ("TTFT ms, median / p90 / p99", " / ".join(f"{v * 1e3:.0f}" for v in result["ttft"].values())),
            ("TPOT ms, median / p90 / p99", " / ".join(f"{v * 1e3:.1f}" for v in result["tpot"].values())),
            ("prompt tokens from the cache", f"{result['hit_rate']:.1%}"),
            ("of what an infinite cache finds", "nothing to find" if infinite is None else f"{infinite:.1%}"),
        ],
    )


def _server_options(
    max_model_len: int | None, kv_cache_dtype: str, quantization: str, threads: int | None, speculative: str
) -> list[str]:
    load_options(max_model_len, kv_cache_dtype, quantization, threads, "native")
    options = ["--kv-cache-dtype", kv_cache_dtype, "--quantization", quantization]
    options += ["--max-model-len", str(max_model_len)] if max_model_len else []
    options += ["--speculative", speculative]
    return options + (["--threads", str(threads)] if threads else [])


def record(
    model: ModelArgument,
    streams: Annotated[int, Option(help="Streams side by side.")] = 16,
    prompt: Annotated[int, Option(help="Tokens of each prompt.")] = 128,
    answer: Annotated[int, Option(help="Tokens of each answer.")] = 128,
    turns: Annotated[int, Option(help="Turns of one server after the other.")] = 9,
    json_output: JsonOption = False,
    out: Out = None,
    max_model_len: MaxModelLen = None,
    threads: Threads = None,
) -> None:
    """What recording traffic costs: a server that records and one that does not, in turns."""
    from slipstream.bench.record import measure

    if min(streams, prompt, turns) < 1 or answer < 2:
        raise UsageError("--streams, --prompt and --turns must be positive, --answer at least 2")
    options = _server_options(max_model_len, "bf16", "none", threads, "auto")
    with progress_bar() as bar:
        result = measure(model, options, streams, prompt, answer, turns, bar)
    report(result, json_output, out)
    if not json_output:
        spread = result["recording"]
        print(
            f"{result['tok_s']:.0f} tokens/s with recording, {result['tok_s_without']:.0f} without: "
            f"{spread['median']:.3f} times (turns {spread['min']:.3f}-{spread['max']:.3f}); "
            f"{result['recorded']} answers in {result['bytes'] / 1e3:.0f} kB; the server's process takes "
            f"{result['server_us_a_token']:.0f} us a token, {result['server_us_a_token_without']:.0f} without"
        )
