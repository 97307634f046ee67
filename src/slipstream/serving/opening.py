"""Opening: the engine's process is started, and the routes are built over it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from slipstream.engine.client import EngineClient
from slipstream.engine.messages import EngineInfo
from slipstream.engine.worker import WorkerOptions
from slipstream.models import read_config
from slipstream.serving.app import Api
from slipstream.serving.exchange import ServerLimits
from slipstream.serving.keys import Keys
from slipstream.serving.recording import Served
from slipstream.speculation.card import fingerprint_of
from slipstream.text import load_tokenizer
from slipstream.text.template import ChatTemplate, hash_of
from slipstream.training.recorder import Recorder, RecordOptions
from slipstream.training.records import target_of
from slipstream.weights.open import open_checkpoint


@dataclass(frozen=True, slots=True)
class Opening:
    """What is opened, and how. `formats` are those of tool calls and thoughts; None: as the chat template says."""

    worker: WorkerOptions
    path: Path
    served_name: str
    keys: Keys
    limits: ServerLimits
    recording: RecordOptions | None = None
    formats: tuple[str | None, str | None] = (None, None)


@dataclass(frozen=True, slots=True)
class Opened:
    """A server that only lacks an address."""

    api: Api
    info: EngineInfo
    client: EngineClient
    recorder: Recorder | None

    async def close(self) -> None:
        """End the engine, and write what is still to be recorded."""
        await self.client.close()
        if self.recorder is not None:
            self.recorder.close()


async def opened(wanted: Opening) -> Opened:
    """Start everything. Raises SlipstreamError with the reason."""
    recorder = Recorder(wanted.recording) if wanted.recording is not None else None
    client = EngineClient(wanted.worker)
    loading = asyncio.create_task(client.start())
    try:
        checkpoint = await asyncio.to_thread(open_checkpoint, wanted.path)
        tokenizer = await asyncio.to_thread(load_tokenizer, checkpoint)
        template = ChatTemplate(tokenizer.chat_template) if tokenizer.chat_template else None
        info = await loading
    except BaseException:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await client.close()
        raise
    worker = wanted.worker
    target = target_of(fingerprint_of(read_config(checkpoint), checkpoint), worker.kv_format, worker.quantization)
    origin = Served(target, hash_of(tokenizer.chat_template))
    api = Api(
        client, tokenizer, template, wanted.served_name, wanted.keys, wanted.limits, recorder, origin, wanted.formats
    )  # fmt: skip
    return Opened(api, info, client, recorder)
