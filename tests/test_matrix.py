"""The page of features is what the tests say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix import claims, page

ROOT = Path(__file__).parents[1]


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "features.md").read_text() == page(claims(ROOT / "tests")), "run python -m tests.matrix"


def test_a_feature_that_does_not_exist_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text('@pytest.mark.features("n", "warp drive")\ndef test_x(): ...\n')
    with pytest.raises(ValueError, match="warp drive"):
        claims(tmp_path)
