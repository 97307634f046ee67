"""slipstream serve: OpenAI's API over HTTP; the engine runs in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, overload

from slipstream.cli.commands import Option
from slipstream.cli.options import (
    KvCacheDtype,
    MaxModelLen,
    ModelArgument,
    Quantization,
    Speculation,
    Threads,
    Verify,
    load_options,
    progress_bar,
)
from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.serving.opening import Opening

BACKLOG = 2048
MOST = 1e6
"""Of whatever is counted or lasts: more is a slip of the hand."""
LAST_WORDS = 5
"""Seconds that clients have to read what is written when the server goes away."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    model: ModelArgument,
    host: Annotated[str, Option()] = "127.0.0.1",
    port: Annotated[int, Option(help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, Option("--served-model-name", help="What clients call it; default: MODEL.")
    ] = None,
    api_key: Annotated[list[str], Option("--api-key", help="A key clients must show; repeatable.")] = [],  # noqa: B006
    api_keys_file: Annotated[
        Path | None, Option("--api-keys-file", help="JSON of names, SHA-256 of keys, and limits.")
    ] = None,
    insecure: Annotated[bool, Option("--insecure", help="Serve beyond this machine without keys.")] = False,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[int, Option("--max-num-seqs", help="Sequences that run at once.")] = 256,
    kv_cache_gb: Annotated[
        float | None, Option("--kv-cache-gb", help="Memory for keys and values; default: what fits.")
    ] = None,
    kv_offload_gb: Annotated[
        float | None,
        Option("--kv-offload-gb", help="Memory beside it for preempted sequences; default: what fits."),
    ] = None,
    kv_cache_dtype: KvCacheDtype = "bf16",
    quantization: Quantization = "none",
    threads: Threads = None,
    no_prefix_caching: Annotated[bool, Option("--no-prefix-caching")] = False,
    prefix_store: Annotated[
        str | None,
        Option("--prefix-store", help="Keep cached prefixes on disk, across restarts: FOLDER[,gb=8]."),
    ] = None,
    tpot_target: Annotated[
        float | None, Option("--tpot-target", help="Seconds between tokens that running streams can bear.")
    ] = None,
    ttft_target: Annotated[float | None, Option("--ttft-target", help="Seconds to the first token.")] = None,
    max_queue: Annotated[int, Option("--max-queue", help="Open requests before new ones get 429.")] = 512,
    request_timeout: Annotated[float, Option("--request-timeout", help="Seconds a request may take.")] = 600.0,
    max_body_mb: Annotated[float, Option("--max-body-mb")] = 8.0,
    drain_timeout: Annotated[
        float, Option("--drain-timeout", help="Seconds that open requests have after SIGTERM.")
    ] = 30.0,
    speculative: Speculation = "auto",
    verify: Verify = "exact",
    fixed_size_flush: Annotated[
        int,
        Option("--fixed-size-flush", help="Tokens in each event of a stream, so that steps do not show; 0: off."),
    ] = 0,
    record: Annotated[
        str | None,
        Option(
            "--record",
            help="Keep answers as token ids for training: FILE[,asked][,gb=1][,days=90][,redact=MODULE:FUNCTION].",
        ),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        Option("--tool-call-parser", help="hermes, llama3, mistral or json; default: what the template says."),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        Option("--reasoning-parser", help="think, seed, mistral or none; default: what the template says."),
    ] = None,
    explain: Annotated[bool, Option("--explain", help="Say before loading what to expect.")] = False,
) -> None:
    """Serve a model to many users at once."""
    from slipstream.engine.drafters import Speculative, verification_of
    from slipstream.engine.shelving import parse_store
    from slipstream.engine.worker import WorkerOptions
    from slipstream.serving.exchange import ServerLimits
    from slipstream.serving.keys import load_keys
    from slipstream.serving.opening import Opening
    from slipstream.text.parsers import REASONING, TOOLS
    from slipstream.training.recorder import RecordOptions
    from slipstream.weights.references import resolve

    keys = load_keys(api_key, api_keys_file)
    if host not in LOOPBACK and not keys.required and not insecure:
        raise UsageError(f"--host {host} lets others in: give --api-key or --api-keys-file, or say --insecure")
    for name, value in (
        ("--max-queue", max_queue), ("--request-timeout", request_timeout), ("--max-body-mb", max_body_mb),
        ("--max-num-seqs", max_num_seqs), ("--drain-timeout", drain_timeout), ("--tpot-target", tpot_target),
        ("--ttft-target", ttft_target),
    ):  # fmt: skip
        if value is not None and not 0 < value < MOST:
            raise UsageError(f"{name} must be positive, and less than {MOST:g}")
    if not 0 <= port < 1 << 16:
        raise UsageError("--port is from 0 to 65535")
    for name, given, known in (
        ("--tool-call-parser", tool_call_parser, [*TOOLS]),
        ("--reasoning-parser", reasoning_parser, [*REASONING, "none"]),
    ):  # fmt: skip
        if given is not None and given not in known:
            raise UsageError(f"{name} is one of {', '.join(known)}, not {given!r}")
    options = load_options(max_model_len, kv_cache_dtype, quantization, threads, "native")
    with progress_bar() as bar:
        path = resolve(model, bar)
    recording = RecordOptions.parse(record) if record is not None else None
    if prefix_store is not None:
        parse_store(prefix_store)
        if no_prefix_caching:
            raise UsageError("--prefix-store needs the prefix cache: leave --no-prefix-caching out")
    Speculative.parse(speculative)
    verification_of(verify)
    if not 0 <= fixed_size_flush <= 1024:
        raise UsageError("--fixed-size-flush is from 0 to 1024")
    if kv_cache_gb is not None and not 0 < kv_cache_gb < 1e6:
        raise UsageError("--kv-cache-gb must be positive")
    if kv_offload_gb is not None and not 0 <= kv_offload_gb < 1e6:
        raise UsageError("--kv-offload-gb must not be negative")
    if explain:
        from slipstream.engine.foresight import foresee

        wanted = replace(options, cache_bytes=_bytes(kv_cache_gb), spare_bytes=_bytes(kv_offload_gb, -1), sequences=0)
        expected = foresee(path, wanted, (max_model_len or 2048) // 4, Speculative.parse(speculative))
        print(*expected.lines(), sep="\n", file=sys.stderr)
    worker = WorkerOptions(
        model=model,
        max_len=max_model_len,
        kv_format=kv_cache_dtype,
        quantization=quantization,
        threads=threads,
        cache_bytes=_bytes(kv_cache_gb),
        spare_bytes=_bytes(kv_offload_gb, -1),
        max_sequences=max_num_seqs,
        prefix_cache=not no_prefix_caching,
        tpot_target=tpot_target,
        ttft_target=ttft_target,
        speculative=speculative,
        verify=verify,
        prefix_store=prefix_store or "",
    )
    limits = ServerLimits(max_queue, int(max_body_mb * (1 << 20)), request_timeout, fixed_size_flush)
    listener = _listen(host, port)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    formats = (tool_call_parser, reasoning_parser)
    opening = Opening(worker, path, served_model_name or model, keys, limits, recording, formats)
    served = asyncio.run(_serve(opening, listener, drain_timeout))
    if explain:
        print(expected.compared(served), file=sys.stderr)


@overload
def _bytes(gigabytes: float | None) -> int | None: ...
@overload
def _bytes(gigabytes: float | None, otherwise: int) -> int: ...
def _bytes(gigabytes: float | None, otherwise: int | None = None) -> int | None:
    return otherwise if gigabytes is None else int(gigabytes * 1e9)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio turns Nagle off by this only
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


async def _serve(opening: Opening, listener: socket.socket, drain_timeout: float) -> list[float]:
    """Serve until a signal comes; returns tokens a second of each answer after its first token."""
    import uvicorn

    from slipstream.serving.http import BoundedProtocol
    from slipstream.serving.opening import opened

    found = await opened(opening)
    api, info = found.api, found.info

    class Server(uvicorn.Server):
        """Says that it is going away as soon as it is asked to, answers what is open, and then ends well."""

        leaving: asyncio.Task[None] | None = None

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            loop = asyncio.get_running_loop()
            for sig in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(sig, self._leave, sig)
            yield

        def _leave(self, sig: int) -> None:
            if self.leaving is None:
                api.draining = True
                self.leaving = asyncio.get_running_loop().create_task(self._drain(sig))
            elif not self.leaving.done():  # who says it twice does not want to wait
                self.leaving.cancel()
                self._go(sig)

        async def _drain(self, sig: int) -> None:
            end = time.monotonic() + drain_timeout
            while found.client.waited_for and time.monotonic() < end:
                await asyncio.sleep(0.05)
            self._go(sig)

        def _go(self, sig: int) -> None:
            found.client.give_up("the server went away before the answer was there")
            self.handle_exit(sig, None)

    config = uvicorn.Config(
        api.app(), log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=30,
        timeout_graceful_shutdown=LAST_WORDS, http=BoundedProtocol,
    )  # fmt: skip
    server = Server(config)
    listener.listen(BACKLOG)  # before it is said that anybody may come
    address, port = listener.getsockname()[:2]
    drafter = f"{info.drafter_bytes / 1e6:.0f} MB for the drafter, " if info.drafter_bytes else ""
    print(
        f"{opening.served_name} on http://{address}:{port} ({info.isa}, {info.threads} threads): "
        f"{info.weight_bytes / 1e6:.0f} MB weights, {info.cache_tokens} tokens of cache "
        f"({info.kv_bytes / 1e6:.0f} MB, {info.kv_format}), room for {info.spare_tokens} moved out of it "
        f"({info.spare_bytes / 1e6:.0f} MB), {drafter}up to {info.buffer_bytes / 1e6:.0f} MB of buffers, "
        f"ceiling {info.ceiling_tok_s:.0f} tokens/s for one user",
        file=sys.stderr,
        flush=True,
    )
    gc.freeze()  # what there is now stays: no collection need look at it
    try:
        await server.serve(sockets=[listener])
    finally:
        await found.close()
    return list(api.metrics.rates)
