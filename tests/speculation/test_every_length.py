"""Every family of drafters at every draft length: tokens and log-probabilities are the bits of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.engine import Engine, Model, load_model
from slipstream.program.sampling import SamplingParams
from slipstream.speculation import Counts, Drafter, ExactVerification, Verification
from tests.engine.test_jitter import Said
from tests.speculation.families import DSPARK_LONGEST, FAMILIES, LONGEST, OPTIONS, SLOW, family_of
from tests.speculation.lucky import lucky
from tests.speculation.test_identity import OffByOne, answers
from tests.speculation.test_state import Eager

BASE = SamplingParams(max_tokens=56, ignore_eos=True, logprobs=2)
PENALTIES = {"repetition_penalty": 1.15, "frequency_penalty": 0.3, "presence_penalty": 0.2, "logit_bias": {7: 1.5}}
SETTINGS = [
    replace(BASE, temperature=0.0),
    replace(BASE, temperature=0.0, **PENALTIES),  # type: ignore[arg-type]
    replace(BASE, temperature=0.9, seed=11),
    replace(BASE, temperature=0.7, top_p=0.9, top_k=40, min_p=0.01, seed=12, n=2, **PENALTIES),  # type: ignore[arg-type]
]
Requests = list[tuple[list[int], SamplingParams]]
Load = Callable[[str, int], tuple[Model, Drafter]]


def requests() -> Requests:
    """Prompts that repeat themselves, one for each kind of settings."""
    rng = random.Random(8)
    pieces = [[rng.randrange(256) for _ in range(5 + 3 * place)] for place in range(len(SETTINGS))]
    return [((piece * 12)[:40], params) for piece, params in zip(pieces, SETTINGS, strict=True)]


@pytest.fixture(scope="module")
def plain(tiny_gguf: Path) -> list[dict[int, Said]]:
    return answers(Engine(load_model(str(tiny_gguf), OPTIONS), prefix_cache=False), requests())


@pytest.fixture(scope="module")
def load(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder = tmp_path_factory.mktemp("drafters")

    def loaded(family: str, most: int) -> tuple[Model, Drafter]:
        return family_of(family, tiny_gguf, folder, most)

    return loaded


def drafted(
    load: Load, plain: Sequence[dict[int, Said]], family: str, most: int, rule: Verification | None = None
) -> tuple[list[dict[int, Said]], list[dict[int, Said]], Counts, int]:
    """What drafted answers say, one after the other and all at once; what drafting brought; the longest draft."""
    model, drafter = load(family, most)
    wanted = requests()
    known = {
        (tuple(prompt), choice): said.tokens
        for (prompt, _), choices in zip(wanted, plain, strict=True)
        for choice, said in choices.items()
    }
    lengths = lucky(drafter, known, seed=most) if drafter.neural else []
    controller = Eager([drafter])

    def engine() -> Engine:
        return Engine(model, SLOW, controller=controller, verification=rule or ExactVerification(), ahead=False)

    alone = [said for request in wanted for said in answers(engine(), [request])]
    together = answers(engine(), wanted, random.Random(most))
    total = Counts()
    for counts in controller.counts().values():
        total.merge(counts)
    return alone, together, total, max(lengths, default=most)


def identical(load: Load, plain: list[dict[int, Said]], family: str, most: int) -> None:
    alone, together, counts, longest = drafted(load, plain, family, most)
    assert alone == plain, f"{family}, K = {most}"
    assert together == plain, f"{family}, K = {most}"
    assert longest == most, "drafts as long as that were made"
    assert counts.accepted > 20
    assert counts.drafted > counts.accepted, "and some were rejected"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.features("text drafts", "neural drafts", "sampling", "penalties", "logprobs", "n")
def test_some_lengths(load: Load, plain: list[dict[int, Said]], family: str) -> None:
    for most in (1, 2, DSPARK_LONGEST) if family == "dspark" else (1, 2, 7, LONGEST):
        identical(load, plain, family, most)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_length(load: Load, plain: list[dict[int, Said]], family: str) -> None:
    for most in range(1, 1 + (DSPARK_LONGEST if family == "dspark" else LONGEST)):
        identical(load, plain, family, most)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_off_by_one_is_found_in_every_family(load: Load, plain: list[dict[int, Said]], family: str) -> None:
    alone, together, _, _ = drafted(load, plain, family, 3, OffByOne())
    assert alone != plain
    assert together != plain
