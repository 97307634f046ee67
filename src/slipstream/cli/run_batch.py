"""slipstream run-batch: answer a file of requests in OpenAI's batch form."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from slipstream.cli.commands import Option
from slipstream.cli.options import (
    JsonOption,
    MaxModelLen,
    ModelArgument,
    Quantization,
    Speculation,
    Threads,
    progress_bar,
)
from slipstream.errors import UsageError


def run_batch(
    model: ModelArgument,
    source: Annotated[Path, Option("--input", "-i", help="JSON lines: custom_id, url, body.")],
    out: Annotated[Path, Option("--output", "-o", help="Answers, a line each; a run that was stopped goes on.")],
    served_model_name: Annotated[
        str | None, Option("--served-model-name", help="What the requests call it; default: MODEL.")
    ] = None,
    at_once: Annotated[int, Option("--at-once", help="Requests that are open at a time.")] = 128,
    max_model_len: MaxModelLen = None,
    quantization: Quantization = "none",
    threads: Threads = None,
    speculative: Speculation = "auto",
    json_output: JsonOption = False,
) -> None:
    """Answer every request of a file, through the same routes as the server's."""
    from slipstream.engine.drafters import Speculative
    from slipstream.engine.worker import WorkerOptions
    from slipstream.serving.batch import Done, read_batch
    from slipstream.serving.batch import run_batch as run
    from slipstream.serving.exchange import ServerLimits
    from slipstream.serving.keys import Keys
    from slipstream.serving.openai import MAX_PROMPTS
    from slipstream.serving.opening import Opening, opened
    from slipstream.weights.references import resolve

    if not 1 <= at_once <= 4096:
        raise UsageError("--at-once is from 1 to 4096")
    Speculative.parse(speculative)
    total = sum(1 for _ in read_batch(source))
    worker = WorkerOptions(
        model, max_model_len, quantization=quantization, threads=threads, speculative=speculative
    )  # fmt: skip
    limits = ServerLimits(max_queue=at_once * MAX_PROMPTS, request_timeout=86_400.0)

    name = served_model_name or model

    async def answer() -> Done:
        with progress_bar() as bar:
            found = await opened(Opening(worker, resolve(model, bar), name, Keys([]), limits))
            try:

                def show(done: Done) -> None:
                    bar("answering", done.answered + done.failed + done.known, total)

                return await run(found.api.app(), read_batch(source), out, at_once, show)
            finally:
                await found.close()

    done = asyncio.run(answer())
    if json_output:
        print(json.dumps(asdict(done)))
        return
    print(f"{done.answered} answered, {done.failed} failed, {done.known} that were answered already: {out}")
    if done.failed:
        print("what failed says why in its line", file=sys.stderr)
