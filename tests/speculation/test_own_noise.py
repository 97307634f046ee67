"""Neural drafters that draw with noise of their own, verified by rejection: what the engine says has the target's law.

The drafters are real ones with random weights and a head of four tokens; the target may say these and one more. χ² is
taken over the joint law of the three tokens after the first, which no draft has a part in.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from slipstream.engine import Engine, Model
from slipstream.engine.drafters import Speculative, load_speculative
from slipstream.program import BLOCK_SLOTS, Row, Rows
from slipstream.program.sampling import STREAM_ACCEPT, SamplingParams
from slipstream.speculation import Drafter, dspark, settings
from slipstream.speculation.rejection import RejectionVerification
from tests.engine.test_jitter import collect
from tests.speculation.checkpoints import draft_vocabulary, seed_name
from tests.speculation.families import OPTIONS, SLOW
from tests.speculation.folders import DSPARK, EAGLE3, VOCABULARY, dspark_folder, eagle3_folder
from tests.speculation.test_state import Eager

PROMPT, HEAD, ALSO, LENGTH = [10, 20, 30], 4, 65, 3
TRIALS, LONG_TRIALS = 1_500, 40_000
LEAST = 1e-4
"""A law that is right passes with all but this probability."""
SALTS = {"eagle3": 342, "dspark": 112}
"""Weights whose head has the token 0: its noise is the word that decides whether the first candidate is kept."""
SETTINGS = {
    "plain": SamplingParams(temperature=9.0),
    "penalised": SamplingParams(temperature=7.0, presence_penalty=2.0, logit_bias={ALSO: 1.5}),
}


def head_of(family: str) -> list[int]:
    """The tokens that a drafter knows."""
    case = EAGLE3["speculators-nbr_true"] if family == "eagle3" else DSPARK["speculators-draftvocab"]
    return draft_vocabulary(seed_name(case | {"salt": SALTS[family]}), VOCABULARY, HEAD).tolist()


def loaded(family: str, target: Path, folder: Path) -> tuple[Model, Drafter]:
    make = dspark_folder if family == "dspark" else eagle3_folder
    wanted = Speculative("folder", str(make(folder, HEAD, SALTS[family])), only=True)
    model, controller = load_speculative(str(target), OPTIONS, wanted, drawing="own")
    assert controller is not None
    assert controller.neural is not None
    return model, eager(controller.neural)


def eager(drafter: Drafter) -> Drafter:
    """Drafts as long as there is room for, whatever they promise."""
    propose = drafter.propose
    drafter.propose = lambda asks: propose([ask._replace(price=0.0, chance=lambda c: 1.0) for ask in asks])  # type: ignore[method-assign]
    drafter.prior = lambda draft_class: 0.95  # type: ignore[method-assign]
    return drafter


def law(model: Model, said: tuple[int, ...], allowed: list[int], params: SamplingParams) -> np.ndarray:
    """The distribution of the token after the prompt and what was said, from the logits of one pass."""
    tokens = [*PROMPT, *said]
    rows = Rows.of(
        [Row(0, token, place, place, place - 1, place == len(tokens) - 1) for place, token in enumerate(tokens)],
        [list(range(-(-len(tokens) // BLOCK_SLOTS)))],
    )
    logits = model.executable.step(rows, None, logits=True).logits
    assert logits is not None
    scores = logits[0].astype(np.float64)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in set(said):
        scores[token] -= params.presence_penalty
    p = np.exp((scores[allowed] - scores[allowed].max()) / params.temperature)
    return p / p.sum()


def joint(model: Model, allowed: list[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The law of the second to the last token."""
    chances = {(): 1.0}
    for _ in range(1 + LENGTH):
        longer = {}
        for said, chance in chances.items():
            for token, p in zip(allowed, law(model, said, allowed, params), strict=True):
                longer[*said, token] = chance * p
        chances = longer
    total: Counter[tuple[int, ...]] = Counter()
    for said, chance in chances.items():
        total[said[1:]] += chance
    return total


def fits(family: str, setting: str, target: Path, folder: Path, trials: int) -> float:
    """p-value of what so many answers say against the target's law."""
    model, drafter = loaded(family, target, folder)
    allowed = sorted({*head_of(family), ALSO})
    params = replace(SETTINGS[setting], allowed_tokens=tuple(allowed), max_tokens=2 + LENGTH, ignore_eos=True, n=8)
    expected = joint(model, allowed, params)
    controller, counts = Eager([drafter]), Counter[tuple[int, ...]]()
    for seed in range(trials // params.n):
        # Anew each time: it would learn how fast this model really is, and draft less.
        engine = Engine(model, SLOW, controller=controller, verification=RejectionVerification(), ahead=False)
        for said in collect(engine.run(engine.add(PROMPT, replace(params, seed=seed)))).values():
            counts[tuple(said.tokens[1 : 1 + LENGTH])] += 1
    trials = sum(counts.values())
    (drafted,) = controller.counts().values()
    assert drafted.accepted > trials, "drafts often hold"
    assert drafted.drafted > 1.3 * drafted.accepted, "and often do not"
    rare = [said for said, chance in expected.items() if chance * trials < 5]
    cells = [said for said in expected if said not in rare]
    observed, wanted = [counts[said] for said in cells], [expected[said] * trials for said in cells]
    if rare:
        observed.append(sum(counts[said] for said in rare))
        wanted.append(sum(expected[said] for said in rare) * trials)
    return float(chisquare(observed, wanted).pvalue)


CASES = list(itertools.product(SALTS, SETTINGS))


@pytest.mark.parametrize(("family", "setting"), CASES)
@pytest.mark.features("rejection", "neural drafts", "sampling", "penalties", "n")
def test_the_law_is_kept(family: str, setting: str, tiny_gguf: Path, tmp_path: Path) -> None:
    assert fits(family, setting, tiny_gguf, tmp_path, TRIALS) > LEAST


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("family", "setting"), CASES)
def test_the_law_is_kept_long(family: str, setting: str, tiny_gguf: Path, tmp_path: Path) -> None:
    assert fits(family, setting, tiny_gguf, tmp_path, LONG_TRIALS) > LEAST


@pytest.mark.parametrize("family", SALTS)
def test_noise_that_is_shared_is_found(
    family: str, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn with the noise that decides whether a draft is kept, drafts bend the law, and these trials show it."""
    for module in (dspark, settings):
        monkeypatch.setattr(module, "STREAM_DRAFT", STREAM_ACCEPT)
    assert fits(family, "plain", tiny_gguf, tmp_path, TRIALS) < LEAST
