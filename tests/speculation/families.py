"""Every family of drafters for the tiny target, each with any longest draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slipstream.engine import LoadOptions, Model, load_model
from slipstream.engine.drafters import Speculative, load_speculative
from slipstream.speculation import Drafter, ModelDrafter, SuffixDrafter
from slipstream.speculation.eagle3_tree import TreeShape
from slipstream.speculation.settings import Drawing
from tests.speculation.folders import dspark_folder, eagle3_folder
from tests.speculation.scripted import FREE

OPTIONS = LoadOptions(max_rows=64, threads=1)
SLOW = replace(FREE, pace=1000.0)
"""Steps beside which a drafter's passes cost nothing."""
FAMILIES = ["ngram", "suffix", "draft", "eagle3", "eagle3-tree", "dspark"]
LONGEST, DSPARK_LONGEST = 16, 4
"""A DSpark drafter drafts as many tokens as its block has."""


def family_of(
    family: str, target: Path, folder: Path, most: int, drawing: Drawing | None = None
) -> tuple[Model, Drafter]:
    """The target and a drafter of a family that drafts `most` tokens at a time; its folder, if it needs one, is made
    in `folder`.
    """
    if family in ("ngram", "suffix"):
        return load_model(str(target), OPTIONS), SuffixDrafter(learn=family == "suffix", most=most)
    if family == "draft":
        model, twin = load_model(str(target), OPTIONS), load_model(str(target), OPTIONS)
        drafter: Drafter = ModelDrafter(twin.executable, "twin", 64, drawing=drawing or "coupled")
    else:
        make, path = (dspark_folder, folder / "dspark") if family == "dspark" else (eagle3_folder, folder / "eagle3")
        if not path.exists():  # a drafter whose file is another one is another drafter
            make(path)
        tree = TreeShape(most, max(1, (most + 1) // 2), min(most, 3)) if family == "eagle3-tree" else None
        model, controller = load_speculative(
            str(target), OPTIONS, Speculative("folder", str(path), tree, only=True), drawing=drawing
        )
        assert controller is not None
        assert controller.neural is not None
        drafter = controller.neural
    assert family != "dspark" or drafter.most == DSPARK_LONGEST
    drafter.most = most
    return model, drafter
