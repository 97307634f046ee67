"""What an answer's settings mean for a drafter whose head knows some of the tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from slipstream.engine import Engine
from slipstream.program import Draft
from slipstream.program.sampling import SamplingParams
from slipstream.speculation import Ask
from slipstream.speculation.settings import DraftSettings, Drawing
from tests.engine.test_jitter import collect
from tests.speculation.families import SLOW, family_of
from tests.speculation.test_rejection import answer_of
from tests.speculation.test_state import Eager

HEAD = np.array([3, 7, 40, 64, 100], np.int32)


def rows_allowed(allowed: Sequence[int]) -> list[int] | None:
    settings = DraftSettings(HEAD, "own")
    mask = settings.draw(answer_of(SamplingParams(allowed_tokens=tuple(allowed)), 1), []).mask
    if mask is None:
        return None
    return [row for row in range(32 * len(mask)) if mask[row >> 5] >> (row & 31) & 1]


def test_allowed_tokens_are_those_of_the_head() -> None:
    """A mask is over the target's tokens, the head's rows are others."""
    assert rows_allowed([7, 40, 41]) == [1, 2]
    assert rows_allowed([0, 1, 2, 3]) == [0]
    assert rows_allowed([100, 250]) == [4]
    assert rows_allowed([0, 250]) is None, "it knows none of them: what it drafts will not hold anyway"
    whole = DraftSettings(None).draw(answer_of(SamplingParams(allowed_tokens=(0, 5)), 1), []).mask
    assert whole is not None
    assert whole.tolist() == [0b100001]


@pytest.mark.parametrize("drawing", ["likeliest", "coupled", "own"])
def test_drafts_are_of_allowed_tokens(drawing: Drawing, tiny_gguf: Path, tmp_path: Path) -> None:
    model, drafter = family_of("eagle3", tiny_gguf, tmp_path, 4, drawing)
    allowed = tuple(range(120))
    drafts: list[Draft] = []
    propose = drafter.propose

    def watched(asks: Sequence[Ask]) -> list[Draft | None]:
        made = propose([ask._replace(price=0.0, chance=lambda draft_class: 1.0) for ask in asks])
        drafts.extend(draft for draft in made if draft is not None)
        return made

    drafter.propose = watched  # type: ignore[method-assign]
    params = SamplingParams(temperature=1.0, seed=4, allowed_tokens=allowed, max_tokens=30, ignore_eos=True)
    engine = Engine(model, SLOW, controller=Eager([drafter]), ahead=False)
    said = collect(engine.run(engine.add([10, 20, 30], params)))[0].tokens
    plain = Engine(model)
    assert said == collect(plain.run(plain.add([10, 20, 30], params)))[0].tokens
    drafted = {token for draft in drafts for token in draft.tokens}
    assert len(drafted) > 3
    assert drafted <= set(allowed)
