"""Admin: drafters come and go; trainings see when to give way. For keys that may, or, without keys, this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request

from slipstream.engine.client import EngineClient, EngineDiedError
from slipstream.engine.drafters import Speculative
from slipstream.engine.messages import RolloutStats
from slipstream.errors import SlipstreamError, UsageError
from slipstream.serving.activity import Activity
from slipstream.serving.errors import ApiError, bad_request
from slipstream.serving.exchange import disconnected
from slipstream.serving.keys import Key
from slipstream.weights.references import resolve

LOOPBACK = ("127.0.0.1", "::1")
LOCAL_NAMES = (*LOOPBACK, "localhost")
MOST_SECONDS = 30.0
"""For which an answer about activity is waited for."""


class DeployBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/drafter. Without `drafter` the stage of the one that is there is changed."""

    stage: str
    drafter: str = ""
    share: float = 0.1
    auto: bool = False


def allow(request: Request, key: Key, *, keys: bool) -> None:
    """Raise ApiError 403 for whoever may not. With keys a key must say admin; without, one must be on this machine.

    Then neither a web page that is open here, nor whoever comes through a proxy on this machine, is taken for its user.
    """
    if keys:
        if key.admin:
            return
        raise ApiError(403, 'this key may not; its entry in --api-keys-file must say "admin": true', "permission_error")
    client = request.client.host if request.client is not None else ""
    headers = request.headers
    through = "origin" in headers or "x-forwarded-for" in headers or "forwarded" in headers
    named = request.url.hostname in LOCAL_NAMES
    if client not in LOOPBACK or through or not named:
        raise ApiError(403, "only this machine may, unless there are keys that may", "permission_error")


def deploy_body(data: bytes) -> DeployBody:
    """Raises ApiError 400 with the field's name."""
    try:
        body = msgspec.json.decode(data, type=DeployBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not what is expected: {error}") from error
    if not 0.0 < body.share <= 1.0:
        raise bad_request("share is greater than 0 and at most 1", "share")
    if len(body.drafter) > 4096:
        raise bad_request("drafter is a path", "drafter")
    return body


async def deploy(client: EngineClient, body: DeployBody) -> dict[str, Any]:
    """Do what is asked; returns what GET says, and warnings. Raises ApiError."""
    try:
        warnings = await client.deploy(body.drafter, body.stage, body.share, auto=body.auto)
    except UsageError as error:
        raise bad_request(str(error), "drafter" if body.drafter else "stage") from error
    except EngineDiedError as error:
        raise ApiError(503, str(error), "server_error", headers={"Retry-After": "2"}) from error
    except SlipstreamError as error:
        raise ApiError(500, str(error), "server_error") from error
    return shown(client) | {"warnings": warnings}


def present(rollout: RolloutStats | None, speculative: str) -> str | None:
    """The folder of the drafter that is at work, whatever looks on or drafts for a few; None: it has no folder."""
    if rollout is not None and rollout.outcome is None and rollout.stage == "all":
        return rollout.candidate
    if rollout is not None and rollout.before:
        return rollout.before
    started = Speculative.parse(speculative)
    return str(resolve(started.reference).resolve()) if started.kind == "folder" else None


def drafts(client: EngineClient) -> list[dict[str, Any]]:
    """What each drafter brought the traffic of each tag."""
    return [
        {
            "drafter": d.drafter, "tag": d.tag, "verifications": d.rounds, "drafted": d.drafted,
            "accepted": d.accepted, "tau": 1 + d.accepted / max(d.rounds, 1),
            "speedup_predicted": d.speedup_predicted, "speedup_measured": d.speedup_measured,
        }
        for d in client.stats.drafts
    ]  # fmt: skip


def shown(client: EngineClient) -> dict[str, Any]:
    """What drafts for what, the rollout that there is or was last, and how drafters fare by tag."""
    stats, options = client.stats, client.options
    return {
        "present": present(stats.rollout, options.speculative),
        "kv_cache_dtype": options.kv_format,
        "quantization": options.quantization,
        "rollout": msgspec.to_builtins(stats.rollout) if stats.rollout is not None else None,
        "drafters": [
            {"drafter": d.drafter, "tag": d.tag, "verifications": d.rounds, "tau": 1 + d.accepted / max(d.rounds, 1)}
            for d in stats.drafts
        ],
    }


def activity_asked(query: Mapping[str, str]) -> tuple[int | None, float]:
    """After how many that have begun, if that is said, and the seconds to wait. Raises ApiError 400 with the field."""
    since, wait = query.get("since"), query.get("wait", "0")
    if since is not None and not (since.isascii() and since.isdigit() and len(since) <= 18):
        raise bad_request("since is a whole number, 0 or more", "since")
    try:
        seconds = float(wait)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0.0:  # NaN is refused, too
        raise bad_request("wait is a number of seconds, 0 or more", "wait")
    return None if since is None else int(since), min(seconds, MOST_SECONDS)


async def activity(request: Request, activity: Activity) -> dict[str, Any]:
    """What is open and what has begun, when there is something to tell or the time is over. Raises ApiError."""
    since, seconds = activity_asked(request.query_params)
    busy = asyncio.create_task(activity.after(activity.begun if since is None else since))
    left = asyncio.create_task(disconnected(request))
    try:
        await asyncio.wait([busy, left], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        busy.cancel()
        left.cancel()
    return {"open": activity.open, "begun": activity.begun}
