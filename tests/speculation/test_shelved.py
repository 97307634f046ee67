"""A neural drafter beside a prefix store on disk: after a restart it drafts as if it had seen the beginning."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from slipstream.engine import Engine, Model
from slipstream.kvcache import Shelf
from slipstream.program.sampling import SamplingParams
from slipstream.speculation import Controller, Drafter
from tests.engine.test_jitter import Said
from tests.speculation.families import SLOW, family_of
from tests.speculation.test_identity import answers
from tests.speculation.test_state import Eager, Seen, watch

PROMPT = [random.Random(5).randrange(256) for _ in range(300)]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True, logprobs=1)
FAMILIES = ["eagle3", "eagle3-tree", "dspark", "draft"]
MOST = 4


def started(family: str, target: Path, folder: Path, store: Path | None) -> tuple[Engine, Drafter, Seen]:
    """An engine of a new process, with a store or without a prefix cache, and what its drafter says from now on."""
    model, drafter = family_of(family, target, folder, MOST)
    watch(drafter, seen := {})
    drafter.prior = lambda draft_class: 0.9  # type: ignore[method-assign]
    engine = Engine(model, SLOW, prefix_cache=store is not None, controller=Eager([drafter]), ahead=False)
    if store is not None:
        engine.keep_blocks(shelf_of(model, store))
    return engine, drafter, seen


def shelf_of(model: Model, store: Path) -> Shelf:
    return Shelf(store, 1 << 30, model.executable.operands.cache.block_bytes, "these weights")  # type: ignore[attr-defined]


def say(engine: Engine, prompt: list[int] = PROMPT) -> tuple[Said, int]:
    """An answer, and how much of its prompt was known."""
    (said,) = answers(engine, [(prompt, PARAMS)])
    while engine.shelving:
        engine.shelve()
    engine.check()
    return said[0], engine.timings[max(engine.timings)].cached_tokens


def beginnings(seen: Seen) -> dict[object, tuple[int, ...]]:
    """The first two tokens of each draft: its length depends on what drafting lately brought."""
    return {key: drafts[0][:2] for key, drafts in seen.items() if len(drafts[0]) > 1}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.features("neural drafts", "prefix cache", "prefix store", "logprobs")
def test_drafts_after_a_restart(family: str, tiny_gguf: Path, tmp_path: Path) -> None:
    """The same tokens, and the same drafts for them, as if nothing had been known."""
    store, other = tmp_path / "store", [*PROMPT[:150], 7, 8, 9]
    cold, _, expected = started(family, tiny_gguf, tmp_path, None)
    said, longer = say(cold)[0], say(cold, other)[0]
    first, _, _ = started(family, tiny_gguf, tmp_path, store)
    assert say(first) == (said, 0)
    again, _, seen = started(family, tiny_gguf, tmp_path, store)
    assert say(again) == (said, 288)
    assert say(again, other) == (longer, 128)
    drafts, wanted = beginnings(seen), beginnings(expected)
    if family == "eagle3-tree":  # a smaller tree is not the beginning of a larger one
        assert len(seen) > 5
        both = [key for key in seen.keys() & expected.keys() if len(seen[key][0]) == len(expected[key][0])]
        assert len(both) > 5
        assert all(seen[key][0] == expected[key][0] for key in both)
        return
    assert len(drafts.keys() & wanted.keys()) > 5
    assert all(drafts[key] == wanted[key] for key in drafts.keys() & wanted.keys())


@pytest.mark.parametrize("family", ["eagle3", "dspark"])
def test_another_drafter_finds_nothing(
    family: str, tiny_gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does a server without one; each computes the beginning again, and keeps its own."""
    store = tmp_path / "store"
    mine, _, _ = started(family, tiny_gguf, tmp_path / "a", store)
    said, _ = say(mine)
    other, _, seen = started(family, tiny_gguf, tmp_path / "b", store)
    with caplog.at_level(logging.WARNING):
        assert say(other) == (said, 0)
    assert seen, "it drafts"
    assert "damaged" not in caplog.text
    for folder in ("a", "b"):
        again, _, _ = started(family, tiny_gguf, tmp_path / folder, store)
        assert say(again) == (said, 288)
    model, _ = family_of("ngram", tiny_gguf, tmp_path, MOST)
    for _ in range(2):
        bare = Engine(model)
        bare.keep_blocks(shelf_of(model, store))
        cached = say(bare)
    assert cached == (said, 288)


def test_names_of_waiting_answers_follow_the_drafter(tiny_gguf: Path, tmp_path: Path) -> None:
    """Exchanged while an answer waits: what the last drafter put there is neither read nor removed."""
    store = tmp_path / "store"
    first, _, _ = started("eagle3", tiny_gguf, tmp_path / "a", store)
    said, _ = say(first)
    files = len(list(store.iterdir()))
    engine, _, _ = started("eagle3", tiny_gguf, tmp_path / "a", store)
    _, new = family_of("eagle3", tiny_gguf, tmp_path / "b", MOST)
    number = engine.add(PROMPT, PARAMS)
    engine.use(Controller([new]))
    tokens = [token for chunk in engine.run(number) for token in chunk.token_ids]
    assert tokens == said.tokens
    assert engine.timings[number].cached_tokens == 0
    assert len(list(store.iterdir())) == files
