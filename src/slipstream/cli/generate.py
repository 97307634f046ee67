"""slipstream generate: one prompt, one or more answers, and how near the ceiling they were written."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from slipstream.cli.commands import Option
from slipstream.cli.options import (
    Backend,
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
    running_on,
)
from slipstream.engine import Chunk, Engine, LoadOptions, Model, Timings
from slipstream.engine.ceiling import Ceiling, measure_ceiling
from slipstream.errors import UsageError
from slipstream.program.sampling import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.foresight import Foresight
    from slipstream.speculation import Controller


def parse_logit_bias(entries: list[str]) -> dict[int, float]:
    """["17=-5", …] as {17: -5.0}. Raises UsageError."""
    result = {}
    for entry in entries:
        token, separator, bias = entry.partition("=")
        try:
            result[int(token)] = float(bias)
        except ValueError:
            separator = ""
        if not separator:
            raise UsageError(f"--logit-bias takes TOKEN=BIAS, not {entry!r}")
    return result


def generate(
    model: ModelArgument,
    prompt: Annotated[str, Option("-p", "--prompt", help="The prompt; - reads standard input.")],
    chat: Annotated[bool, Option("--chat", help="Use the model's chat template.")] = False,
    system: Annotated[str | None, Option(help="System message, with --chat.")] = None,
    max_tokens: Annotated[int, Option("--max-tokens")] = 256,
    temperature: Annotated[float, Option(help="0 takes the likeliest token.")] = 0.7,
    seed: Annotated[int | None, Option(help="Same seed, same answer.")] = None,
    top_k: Annotated[int, Option("--top-k", help="0: off.")] = 0,
    top_p: Annotated[float, Option("--top-p")] = 0.95,
    min_p: Annotated[float, Option("--min-p")] = 0.0,
    repetition_penalty: Annotated[float, Option("--repetition-penalty")] = 1.0,
    presence_penalty: Annotated[float, Option("--presence-penalty")] = 0.0,
    frequency_penalty: Annotated[float, Option("--frequency-penalty")] = 0.0,
    logit_bias: Annotated[list[str], Option("--logit-bias", help="TOKEN=BIAS, repeatable.")] = [],  # noqa: B006
    stop: Annotated[list[str], Option(help="Stop string, repeatable.")] = [],  # noqa: B006
    min_tokens: Annotated[int, Option("--min-tokens")] = 0,
    ignore_eos: Annotated[bool, Option("--ignore-eos")] = False,
    logprobs: Annotated[int | None, Option(help="Log-probabilities of this many tokens.")] = None,
    n: Annotated[int, Option("-n", help="Answers.")] = 1,
    explain: Annotated[
        bool, Option("--explain", help="Say before loading what to expect, and afterwards where the time went.")
    ] = False,
    json_output: JsonOption = False,
    max_model_len: MaxModelLen = None,
    kv_cache_dtype: KvCacheDtype = "bf16",
    quantization: Quantization = "none",
    threads: Threads = None,
    backend: Backend = "native",
    speculative: Speculation = "auto",
    verify: Verify = "exact",
) -> None:
    """Write an answer, then say how fast, and how near the memory-bandwidth ceiling."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=parse_logit_bias(logit_bias),
        stop=tuple(stop),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        n=n,
        seed=seed,
    )
    options = load_options(max_model_len, kv_cache_dtype, quantization, threads, backend)
    text = sys.stdin.read() if prompt == "-" else prompt
    foresight = _foresee(model, options, len(text) // 4 + max_tokens // 2, speculative) if explain else None
    started = time.perf_counter()
    drafted = open_drafted(model, options, speculative, verify, quick=not explain)
    loaded = drafted.model
    load_seconds = time.perf_counter() - started
    if not json_output:
        print(f"{model} on {running_on(loaded)}", file=sys.stderr)
    engine = drafted.engine()
    number = engine.add(_tokens(loaded, text, chat, system), params)
    chunks = engine.run(number)
    answers = _collect(chunks, n) if json_output else _show(chunks, n)
    timings = engine.timings[number]
    ceiling = measure_ceiling(loaded)
    if json_output:
        report = {
            "model": model,
            **(answers[0] if n == 1 else {"choices": answers}),
            "timings": {"load_seconds": load_seconds, **timings_report(timings, ceiling)},
            "speculation": speculation_report(timings, engine.controller),
        }
        if foresight is not None:
            report["explain"] = _compared(foresight, timings, engine, number)
        print(json.dumps(report, ensure_ascii=False))
        return
    print(f"\n{summary(timings, ceiling)}", file=sys.stderr)
    if timings.drafts.rounds:
        print(drafts_line(timings, engine.controller), file=sys.stderr)
    if engine.controller is not None and (problem := engine.controller.disappointed()):
        print(f"warning: {problem}", file=sys.stderr)
    if foresight is not None:
        compared = _compared(foresight, timings, engine, number)
        print(
            f"expected {compared['expected_tok_s']:.0f} tokens/s, measured {compared['measured_tok_s']:.0f} "
            f"({compared['measured_tok_s'] / compared['expected_tok_s'] - 1:+.0%}); {compared['verdict']}",
            file=sys.stderr,
        )


def summary(timings: Timings, ceiling: Ceiling | None) -> str:
    """One line: tokens, speed, and the share of the ceiling."""
    rate = timings.decode_tok_s
    line = f"{timings.prompt_tokens} + {timings.generated} tokens, {rate:.0f} tokens/s"
    if ceiling is None or not rate:
        return line
    return (
        f"{line} = {rate / ceiling.tok_s:.0%} of the ceiling of {ceiling.tok_s:.0f} "
        f"({ceiling.read_gb_s:.1f} GB/s over {ceiling.bytes_per_token / 1e6:.0f} MB a token; {ceiling.isa})"
    )


def speculation_report(timings: Timings, controller: Controller | None) -> dict[str, Any]:
    """What drafting brought an answer, as --json prints it."""
    drafts = timings.drafts
    report: dict[str, Any] = {
        "verifications": drafts.rounds,
        "drafted_tokens": drafts.drafted,
        "accepted_tokens": drafts.accepted,
        "tau": drafts.tau,
        "tau_without_bonus": drafts.tau - 1.0,
        "acceptance_by_position": drafts.conditional(),
    }
    if controller is not None and controller.pace.steps:
        report |= {
            "speedup_predicted": controller.pace.predicted_speedup,
            "speedup_measured": controller.pace.measured_speedup,
        }
    return report


def drafts_line(timings: Timings, controller: Controller | None) -> str:
    """One line: how many drafts held, and what that brought."""
    drafts = timings.drafts
    line = (
        f"drafts: {drafts.accepted} of {drafts.drafted} tokens held, {drafts.tau:.2f} tokens a verification "
        f"({drafts.rounds} of them)"
    )
    if controller is None or not controller.pace.steps:
        return line
    pace = controller.pace
    return f"{line}; those steps ran {pace.measured_speedup:.2f} times as fast ({pace.predicted_speedup:.2f} expected)"


def _foresee(model: str, options: LoadOptions, context: int, speculative: str) -> Foresight:
    """Memory, speed and bottleneck, printed before any weight is loaded."""
    from slipstream.engine.drafters import Speculative
    from slipstream.engine.foresight import foresee
    from slipstream.weights.references import resolve

    with progress_bar() as bar:
        foresight = foresee(resolve(model, bar), options, context, Speculative.parse(speculative))
    for line in foresight.lines():
        print(line, file=sys.stderr)
    return foresight


def _compared(foresight: Foresight, timings: Timings, engine: Engine, number: int) -> dict[str, Any]:
    """What was expected against what came."""
    from slipstream.engine.explain import explain_finished

    waterfall = explain_finished(engine, number)
    return {
        "weight_bytes": foresight.weight_bytes,
        "cache_bytes": foresight.cache_bytes,
        "expected_tok_s": foresight.expected_tok_s,
        "bottleneck": foresight.bottleneck(),
        "measured_tok_s": timings.decode_tok_s,
        "parts": {part.name: part.seconds for part in waterfall.parts} if waterfall else {},
        "verdict": waterfall.verdict() if waterfall else "the answer is too short to say where its time went.",
    }


def _tokens(model: Model, text: str, chat: bool, system: str | None) -> list[int]:
    if not chat:
        if system is not None:
            raise UsageError("--system needs --chat")
        return model.tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return model.chat_prompt(messages)


def _collect(chunks: Iterator[Chunk], n: int) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = [
        {"text": "", "token_ids": [], "finish_reason": None, "logprobs": []} for _ in range(n)
    ]
    for chunk in chunks:
        answer = answers[chunk.choice]
        answer["text"] += chunk.text
        answer["token_ids"] += chunk.token_ids
        answer["finish_reason"] = chunk.finish_reason
        answer["logprobs"] += [
            {"token": entry.token, "logprob": entry.logprob, "top": entry.top} for entry in chunk.logprobs
        ]
    for answer in answers:
        if not answer["logprobs"]:
            del answer["logprobs"]
    return answers


def _show(chunks: Iterator[Chunk], n: int) -> list[dict[str, Any]]:
    if n > 1:
        answers = _collect(chunks, n)
        for index, answer in enumerate(answers):
            print(f"--- {index}\n{answer['text']}")
        return answers
    for chunk in chunks:
        print(chunk.text, end="", flush=True)
    print()
    return []


def timings_report(timings: Timings, ceiling: Ceiling | None) -> dict[str, Any]:
    """How fast an answer was, as --json prints it."""
    report: dict[str, Any] = {
        "prompt_tokens": timings.prompt_tokens,
        "generated_tokens": timings.generated,
        "prefill_seconds": timings.prefill_seconds,
        "decode_seconds": timings.decode_seconds,
        "decode_tok_s": timings.decode_tok_s,
    }
    if ceiling is not None:
        report |= {
            "isa": ceiling.isa,
            "threads": ceiling.threads,
            "bytes_per_token": ceiling.bytes_per_token,
            "read_gb_s": ceiling.read_gb_s,
            "ceiling_tok_s": ceiling.tok_s,
            "fraction_of_ceiling": timings.decode_tok_s / ceiling.tok_s,
        }
    return report
