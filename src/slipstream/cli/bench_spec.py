"""slipstream bench spec: what drafts bring on given prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from slipstream.cli.bench import Out, report
from slipstream.cli.commands import Option
from slipstream.cli.options import (
    JsonOption,
    KvCacheDtype,
    MaxModelLen,
    ModelArgument,
    Quantization,
    Speculation,
    Threads,
    Verify,
    load_options,
    open_drafted,
    progress_bar,
    table,
)
from slipstream.errors import UsageError
from slipstream.speculation.settings import Drawing

OVERHEAD_PROMPTS = 8


def spec(
    model: ModelArgument,
    prompts: Annotated[
        Path | None,
        Option("--prompts", help="JSON lines: Spec-Bench, HumanEval, OpenAI messages, … Default: a few of our own."),
    ] = None,
    speculative: Speculation = "auto",
    verify: Verify = "exact",
    limit: Annotated[int, Option("--limit", help="Prompts of each category.")] = 8,
    max_tokens: Annotated[int, Option("--max-tokens")] = 128,
    temperature: Annotated[float, Option()] = 0.0,
    streams: Annotated[int, Option(help="Answers at a time; more than 1 measures throughput.")] = 1,
    turns: Annotated[int, Option(help="Turns of plain and drafted, with more than one stream.")] = 3,
    drawing: Annotated[
        str | None,
        Option(
            "--drawing",
            help="How neural drafts are drawn for sampled answers: coupled (with the answer's noise) or likeliest.",
        ),
    ] = None,
    force_accept: Annotated[
        float | None,
        Option("--force-accept", help="Accept drafts with this chance, whatever they say: for measuring v and d."),
    ] = None,
    overheads: Annotated[
        bool,
        Option("--overheads", help="Measure too what a pass of the drafter and drafters with no draft cost."),
    ] = False,
    json_output: JsonOption = False,
    out: Out = None,
    max_model_len: MaxModelLen = None,
    kv_cache_dtype: KvCacheDtype = "bf16",
    quantization: Quantization = "none",
    threads: Threads = None,
) -> None:
    """Answer prompts plain and drafted, by turns: S, tau, and what verifying and drafting cost."""
    from dataclasses import replace

    from slipstream.bench.prompts import own_talks, read_talks
    from slipstream.bench.spec import forced, measure, side_by_side
    from slipstream.bench.spec_costs import Rounds
    from slipstream.bench.spec_overheads import overheads as measure_overheads
    from slipstream.program.sampling import SamplingParams
    from slipstream.speculation import ForcedVerification

    if limit < 1 or max_tokens < 2 or streams < 1 or turns < 1:
        raise UsageError("--limit, --streams and --turns must be positive, --max-tokens at least 2")
    if speculative == "off":
        raise UsageError("--speculative off leaves nothing to measure")
    if force_accept is not None and not 0.0 <= force_accept <= 1.0:
        raise UsageError("--force-accept is from 0 to 1")
    if streams > 1 and (force_accept is not None or verify != "exact"):
        raise UsageError("several --streams are measured with --verify exact and without --force-accept")
    talks = read_talks(prompts, limit) if prompts is not None else own_talks(limit)
    options = load_options(max_model_len, kv_cache_dtype, quantization, threads, "native")
    drafted = open_drafted(
        model, replace(options, sequences=max(4, streams)), speculative, verify, quick=False, fresh=True,
        drawing=_drawing(drawing),
    )  # fmt: skip
    assert drafted.cost is not None
    assert drafted.controller is not None
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
    with progress_bar() as bar:

        def progress(done: int, total: int) -> None:
            bar("measuring", done, total)

        if streams > 1:
            result = side_by_side(
                drafted.model, drafted.cost, drafted.controller, talks, params, streams, turns, progress
            )
        else:
            verification = ForcedVerification(force_accept) if force_accept is not None else drafted.verification
            rounds = Rounds(drafted.controller) if force_accept is not None else None
            result = measure(
                drafted.model, drafted.cost, drafted.controller, verification, talks, params, progress, rounds
            )
            if force_accept is not None and rounds is not None:
                result = forced(result, force_accept, rounds)
        if overheads:
            first = [drafted.model.chat_prompt([*t.before, {"role": "user", "content": t.turns[0]}]) for t in talks]
            fitting = [prompt for prompt in first if len(prompt) + max_tokens <= drafted.model.max_len][
                :OVERHEAD_PROMPTS
            ]
            result["overheads"] = measure_overheads(
                drafted.model, drafted.cost, drafted.controller, fitting, params, lambda n: bar("overheads", n, 100)
            )
    named = prompts.name if prompts is not None else "our own"
    result |= {"drawing": drawing, "speculative": speculative, "verify": verify, "prompt_set": named}
    report(result, json_output, out)
    if not json_output:
        _table(result)


def _drawing(name: str | None) -> Drawing | None:
    if name is None:
        return None
    if name == "coupled":
        return "coupled"
    if name == "likeliest":
        return "likeliest"
    raise UsageError(f"--drawing is coupled or likeliest, not {name!r}")


def _table(result: dict[str, Any]) -> None:
    title = f"{result['model']}, --speculative {result['speculative']}, {result['prompt_set']}"
    if "categories" not in result:
        rows = [
            ("throughput", f"{result['tok_s']:.0f} against {result['plain_tok_s']:.0f} tokens/s"),
            ("S", f"{result['speedup']:.3f}"),
            ("p99 of seconds per token", f"{result['tpot']['p99']:.4f} against {result['plain_tpot']['p99']:.4f}"),
            ("by turns, one over the other", f"{result['p99_tpot_ratio']['median']:.3f}"),
        ]
        table(f"{title}, {result['streams']} streams", rows)
        return
    entries: list[tuple[str, ...]] = [
        (
            name, f"{e['plain_tok_s']:.1f}", f"{e['tok_s']:.1f}", f"{e['speedup']:.2f}", f"{e['tau']:.2f}",
            f"{e['accepted']}/{e['drafted']}",
        )
        for name, e in result["categories"].items()
    ]  # fmt: skip
    table(title, entries, ("category", "plain tok/s", "drafted tok/s", "S", "tau", "accepted"))
    same = "the same as plain decoding" if result["identical"] else "NOT those of plain decoding"
    verify = ", ".join(f"{k}: {v:.2f}" for k, v in result["verify_cost"].items())
    print(f"mean S {result['mean_speedup']:.3f}, least {result['least_speedup']:.3f}; answers are {same}")
    if found := result.get("overheads"):
        print(f"drafters that never draft: {found['silent_drafters']['median']:.3f} of the time without drafters")
        if found.get("unasked_drafter"):
            print(f"the drafter, never asked: {found['unasked_drafter']['median']:.3f} of it")
        if found.get("pass"):
            print(f"a pass of the drafter, each beside a plain step right after it: c = {found['pass']['median']:.3f}")
    if measured := result.get("measured_costs"):
        for name, key in (("verifying", "verify_cost"), ("making", "draft_cost")):
            costs = ", ".join(f"{k}: {cost:.2f}" for k, cost in measured[key].items()) or "too few rounds"
            print(f"{name} K drafts took, in plain steps of this run: {costs}")
    print(f"verifying K drafts costs, in steps of one row: {verify}; a pass of the drafter c = {result['c']:.3f}")


def spec_prediction(
    model: ModelArgument,
    acceptance: Annotated[float, Option(help="Chance with which each draft is made to hold.")] = 0.8,
    turns: Annotated[int, Option(help="Turns of plain and drafted decoding in each cell.")] = 5,
    json_output: JsonOption = False,
    out: Out = None,
    kv_cache_dtype: KvCacheDtype = "bf16",
    quantization: Quantization = "none",
    threads: Threads = None,
) -> None:
    """How well S is predicted, over batch, draft length and context."""
    from dataclasses import replace

    from slipstream.bench.spec_prediction import BATCHES, measure
    from slipstream.engine import load_model
    from slipstream.engine.cost import cost_model

    if not 0.0 <= acceptance <= 1.0 or turns < 1:
        raise UsageError("--acceptance is from 0 to 1, --turns at least 1")
    options = load_options(None, kv_cache_dtype, quantization, threads, "native")
    with progress_bar() as bar:
        loaded = load_model(model, replace(options, sequences=max(BATCHES)), bar)
        cost = cost_model(loaded)
        result = measure(loaded, cost, acceptance, turns, lambda done, total: bar("measuring", done, total))
    report(result, json_output, out)
    if not json_output:
        rows = [
            (
                str(c["batch"]), str(c["context"]), str(c["draft_len"]), f"{c['drafted']:.1f}", f"{c['predicted']:.2f}",
                f"{c['measured']:.2f}", f"{c['error']:+.1%}",
            )
            for c in result["cells"]
        ]  # fmt: skip
        title = f"{result['model']}: S where each draft holds with chance {acceptance:.2f}"
        table(title, rows, ("batch", "context", "K at most", "K", "S predicted", "S measured", "error"))
        print(
            f"median error {result['median_error']:.1%}, worst {result['worst_error']:.1%}; "
            f"least S measured {result['least_measured']:.3f}"
        )
