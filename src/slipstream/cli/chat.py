"""slipstream chat: a conversation in the terminal; Ctrl-C stops the answer, not the program."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from slipstream.cli.commands import Option
from slipstream.cli.generate import speculation_report, summary, timings_report
from slipstream.cli.options import (
    Backend,
    Drafted,
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
    running_on,
)
from slipstream.engine.ceiling import Ceiling, measure_ceiling
from slipstream.errors import UsageError
from slipstream.program.sampling import SamplingParams

HELP = "/reset forgets the conversation, /save FILE writes it as JSON, /exit leaves; Ctrl-C stops an answer"


def chat(
    model: ModelArgument,
    system: Annotated[str | None, Option(help="System message.")] = None,
    max_tokens: Annotated[int, Option("--max-tokens")] = 1024,
    temperature: Annotated[float, Option()] = 0.7,
    top_p: Annotated[float, Option("--top-p")] = 0.95,
    seed: Annotated[int | None, Option()] = None,
    json_output: JsonOption = False,
    max_model_len: MaxModelLen = None,
    kv_cache_dtype: KvCacheDtype = "bf16",
    quantization: Quantization = "none",
    threads: Threads = None,
    backend: Backend = "native",
    speculative: Speculation = "auto",
    verify: Verify = "exact",
) -> None:
    """Talk to a model. With --json, every answer is one line of JSON."""
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    options = load_options(max_model_len, kv_cache_dtype, quantization, threads, backend)
    drafted = open_drafted(model, options, speculative, verify)
    ceiling = measure_ceiling(drafted.model)
    talk = Conversation(drafted, params, system, ceiling, json_output)
    if not json_output:
        print(f"{model} on {running_on(drafted.model)}. {HELP}", file=sys.stderr)
    while (line := _read_line()) is not None:
        try:
            if line.startswith("/"):
                if not talk.command(line):
                    return
            elif line.strip():
                talk.answer(line)
        except UsageError as error:
            print(f"slipstream: {error}", file=sys.stderr)


def _read_line() -> str | None:
    """A line, or None at the end of input; Ctrl-C at the prompt clears the line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr)


class Conversation:
    """The messages so far, and how they grow."""

    def __init__(
        self,
        drafted: Drafted,
        params: SamplingParams,
        system: str | None,
        ceiling: Ceiling | None,
        json_output: bool,
    ):
        self.model, self.params, self.ceiling, self.json_output = drafted.model, params, ceiling, json_output
        self.engine = drafted.engine()
        self.start: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.start)
        self.warned = False

    def command(self, line: str) -> bool:
        """Obey a /command; False ends the program."""
        name, _, argument = line.partition(" ")
        match name:
            case "/exit" | "/quit":
                return False
            case "/reset":
                self.messages = list(self.start)
            case "/save":
                if not argument.strip():
                    raise UsageError("/save needs a file name")
                try:
                    Path(argument.strip()).write_text(json.dumps(self.messages, ensure_ascii=False, indent=1))
                except OSError as error:
                    raise UsageError(f"/save: {error}") from error
            case _:
                raise UsageError(f"no command {name}; {HELP}")
        return True

    def answer(self, text: str) -> None:
        """Stream the answer to a message; Ctrl-C keeps what was said so far."""
        prompt = self.model.chat_prompt([*self.messages, {"role": "user", "content": text}])
        number = self.engine.add(prompt, self.params)
        said, reason = "", "abort"
        ids: list[int] = []
        try:
            for chunk in self.engine.run(number):
                said += chunk.text
                ids += chunk.token_ids
                reason = chunk.finish_reason or reason
                if not self.json_output:
                    print(chunk.text, end="", flush=True)
        except KeyboardInterrupt:
            self.engine.cancel(number)
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": said}]
        timings = self.engine.timings.pop(number)
        if self.json_output:
            report = {
                "text": said,
                "token_ids": ids,
                "finish_reason": reason,
                "timings": timings_report(timings, self.ceiling),
                "speculation": speculation_report(timings, self.engine.controller),
            }
            print(json.dumps(report, ensure_ascii=False), flush=True)
        else:
            print(f"\n\033[2m{summary(timings, self.ceiling)}\033[0m" if sys.stdout.isatty() else "")
        controller = self.engine.controller
        if not self.warned and controller is not None and (problem := controller.disappointed()):
            self.warned = True
            print(f"warning: {problem}", file=sys.stderr)
