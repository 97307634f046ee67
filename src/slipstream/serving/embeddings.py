"""Embeddings: OpenAI's /v1/embeddings, from the served model's own hidden states."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np

from slipstream.engine.client import EngineClient, EngineDiedError
from slipstream.errors import SlipstreamError, UsageError
from slipstream.serving.errors import ApiError, bad_request
from slipstream.serving.openai import texts_or_tokens
from slipstream.serving.prompts import Prompts

MOST_INPUTS = 2048
ENCODINGS = ("float", "base64")


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings. Ours besides: `pooling` (mean, last) and `normalize` (to length 1)."""

    input: Any
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: str | None = None
    normalize: bool | None = None


async def inputs_of(body: EmbeddingsRequest, prompts: Prompts) -> list[list[int]]:
    """The token ids of every input. Raises ApiError."""
    if (body.encoding_format or "float") not in ENCODINGS:
        raise bad_request(f"encoding_format is {' or '.join(ENCODINGS)}", "encoding_format")
    if body.dimensions is not None:
        raise bad_request("this model was not made for vectors of other lengths: leave dimensions out", "dimensions")
    work = []
    for given in texts_or_tokens(body.input, "input", MOST_INPUTS):
        tokens = await prompts.of_text(given, "input") if isinstance(given, str) else given
        prompts.fits(tokens, "input")
        work.append(tokens)
    return work


async def embeddings_of(
    work: list[list[int]], body: EmbeddingsRequest, client: EngineClient, served_name: str, tenant: str
) -> dict[str, Any]:
    """The answer's object, for all inputs. Raises ApiError."""
    encoding = body.encoding_format or "float"
    try:
        normalize = body.normalize is not False
        vectors = await client.embed(work, body.pooling or "mean", normalize=normalize, tenant=tenant)
    except UsageError as error:
        raise bad_request(str(error), "pooling" if "pooling" in str(error) else "input") from error
    except EngineDiedError as error:
        raise ApiError(503, str(error), "server_error", headers={"Retry-After": "2"}) from error
    except SlipstreamError as error:
        raise ApiError(500, str(error), "server_error") from error
    count = sum(map(len, work))
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, encoding)}
        for index, vector in enumerate(vectors)
    ]
    return {
        "object": "list", "data": data, "model": served_name, "usage": {"prompt_tokens": count, "total_tokens": count}
    }  # fmt: skip


def _encoded(vector: bytes, encoding: str) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(vector).decode()
    return list(np.frombuffer(vector, "<f4").tolist())
