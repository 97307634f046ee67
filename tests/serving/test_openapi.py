"""The OpenAPI document says what there is, and what requests are made from it never break the server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Route

from slipstream.serving.app import Api
from slipstream.serving.exchange import ServerLimits
from slipstream.serving.gate import Gate
from slipstream.serving.keys import Keys
from slipstream.serving.openapi import BODIES, document
from tests.serving.conftest import KEY, Server, checked


def test_every_route_is_in_it(server: Server) -> None:
    with server.client() as http:
        found = http.get("/openapi.json").json()
        assert found == json.loads(json.dumps(document("tiny", 259)))
        for path, operations in found["paths"].items():
            concrete = path.replace("{id}", "some-id")
            for method in ("get", "post", "delete"):
                if method in operations:
                    status = http.request(method, concrete, content=b"" if method == "post" else None).status_code
                    assert status != 405, (method, path)
                    assert str(status) in operations[method]["responses"], (method, path, status)


def described() -> set[tuple[str, str]]:
    """Every operation in the document: (method, path)."""
    return {
        (method, path)
        for path, operations in document()["paths"].items()
        for method in operations.keys() & {"get", "post", "put", "patch", "delete"}
    }


def test_it_has_every_route() -> None:
    """Every route and method of the application is in the document, and nothing else."""
    nothing = cast(Any, SimpleNamespace(max_queue=1))
    gate = cast(Gate, Api(nothing, nothing, None, "tiny", Keys([]), ServerLimits()).app())
    routes = [route for route in cast(Starlette, gate.inner).routes if isinstance(route, Route)]
    assert len(routes) == len(cast(Starlette, gate.inner).routes) > 10
    served = {
        (method.lower(), re.sub(r":\w+\}", "}", route.path))
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert served == described()


def test_references_lead_somewhere() -> None:
    found = document()

    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            here = [value["$ref"]] if "$ref" in value else []
            return here + [r for inner in value.values() for r in references(inner)]
        return [r for inner in value for r in references(inner)] if isinstance(value, list) else []

    for reference in references(found["paths"]) + references(found["components"]["schemas"]):
        name = reference.removeprefix("#/components/schemas/")
        assert name in found["components"]["schemas"], reference


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 40) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6,
)  # fmt: skip


def fields_of(path: str) -> list[str]:
    return [*BODIES[path][1].__struct_fields__]


@pytest.mark.parametrize("path", sorted(BODIES))
def test_whatever_is_sent_is_answered(server: Server, path: str) -> None:
    """Any of the fields with anything in them: an answer, or an error that says what is wrong; never a 500."""
    right = {
        "messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x", "max_tokens": 2,
        "max_output_tokens": 2, "max_completion_tokens": 2,
    }  # fmt: skip
    names = fields_of(path)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.dictionaries(st.sampled_from(names), JSON, max_size=4), st.booleans())
    def send(fields: dict[str, Any], whole: bool) -> None:
        base = {name: value for name, value in right.items() if name in names} if whole else {}
        body = json.dumps({**base, **fields, "n": 1} if "n" in names else {**base, **fields})
        with server.client() as http:
            answer = http.post(path, content=body)
        assert answer.status_code in (200, 400, 404, 413), (answer.status_code, body, answer.text[:300])
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]

    send()


LEAST = 0.4
"""Share of the right requests of a phase that are answered: which values go together no schema here says."""


@pytest.fixture(scope="module")
def brief(tiny_gguf: Path) -> Iterator[Server]:
    """A server whose answers come to an end soon."""
    options = ("--threads", "1", "--kv-cache-gb", "0.01", "--max-model-len", "256")
    with checked(tiny_gguf, "--api-key", KEY, *options) as running:
        yield running


def test_schemathesis_finds_nothing(brief: Server, tmp_path: Path) -> None:
    """Requests made from the document, right ones and wrong ones, on every route: so many, however long they take.

    None ends in a fault of the server's, and a good part of the right ones in an answer. Deploying aside: it needs a
    drafter on disk, and a key that may.
    """
    report = tmp_path / "report.ndjson"
    command = [
        str(Path(sys.executable).parent / "schemathesis"), "run", f"{brief.url}/openapi.json", "-H",
        f"Authorization: Bearer {KEY}", "--phases", "examples,coverage,fuzzing", "--max-examples", "60", "--seed", "1",
        "--continue-on-failure", "--warnings", "off", "--exclude-checks", "positive_data_acceptance",
        "--report-ndjson-path", str(report),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-4000:]
    scenarios = [event["ScenarioFinished"] for event in map(json.loads, report.open()) if "ScenarioFinished" in event]
    operations = described() - {("get", "/openapi.json")}  # where it has these from
    for phase in ("coverage", "fuzzing"):
        ended = {(one["recorder"]["label"], one["status"]) for one in scenarios if one["phase"] == phase}
        assert ended == {(f"{method.upper()} {path}", "success") for method, path in operations}, phase
        statuses = positive_statuses([one["recorder"] for one in scenarios if one["phase"] == phase])
        posts = {f"POST {path}" for method, path in operations if method == "post"} - {"POST /admin/drafter"}
        assert posts <= statuses.keys()
        for operation in sorted(posts):
            counts = statuses[operation]
            assert max(counts) < 500, (phase, operation, counts)
            answered = sum(count for status, count in counts.items() if 200 <= status < 300)
            assert answered >= LEAST * counts.total(), (phase, operation, counts)


def positive_statuses(recorders: list[dict[str, Any]]) -> dict[str, Counter[int]]:
    """By operation: how often requests that the document allows were answered with which status."""
    found: dict[str, Counter[int]] = {}
    for recorder in recorders:
        counts = found.setdefault(recorder["label"], Counter())
        for number, case in recorder["cases"].items():
            answer = recorder["interactions"].get(number, {}).get("response")
            if answer is not None and case["value"]["meta"]["generation"]["mode"] == "positive":
                counts[answer["status_code"]] += 1
    return found


def test_the_key_is_needed_for_it_too(server: Server) -> None:
    import httpx

    assert httpx.get(f"{server.url}/openapi.json").status_code == 401
    assert httpx.get(f"{server.url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
