"""What a drafter needs of its target, and whose it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.numpy

from slipstream.engine import load_model
from slipstream.engine.drafters import load_candidate
from slipstream.kernels.native import NativeExecutable
from slipstream.speculation.card import Card, write_card
from slipstream.weights.open import open_checkpoint
from tests.speculation.families import OPTIONS
from tests.speculation.folders import dspark_folder, eagle3_folder


def without(folder: Path, name: str) -> None:
    """Take a tensor out of a drafter's file."""
    (file,) = open_checkpoint(folder).files
    tensors = safetensors.numpy.load_file(file)
    tensors.pop(name)
    safetensors.numpy.save_file(tensors, file)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("written", [eagle3_folder, dspark_folder])
def test_what_a_folder_lacks_is_the_targets(
    written: Callable[[Path], Path], own: bool, tiny_gguf: Path, tmp_path: Path
) -> None:
    """In memory, too: nothing is held twice."""
    folder = written(tmp_path)
    if not own:
        without(folder, "embed_tokens.weight")
    model = load_model(str(tiny_gguf), OPTIONS)
    drafter = load_candidate(folder, model).drafter
    assert drafter.needs.taps == (0, 1, 2)
    assert (drafter.needs.embedding, drafter.needs.head) == (not own, False)
    theirs, mine = model.executable, drafter.executable
    assert isinstance(theirs, NativeExecutable)
    assert isinstance(mine, NativeExecutable)
    shared = mine.operands.matrices["embed.weight"] is theirs.operands.matrices["embed.weight"]
    assert shared is not own


def test_whose_it_is(tiny_gguf: Path, tmp_path: Path) -> None:
    folder, model = eagle3_folder(tmp_path), load_model(str(tiny_gguf), OPTIONS)
    assert load_candidate(folder, model).warnings == ()
    write_card(folder, Card(target_fingerprint="another's", made_for="a/b"))
    candidate = load_candidate(folder, model)
    assert candidate.drafter.fingerprint == "another's"
    assert candidate.card.made_for == "a/b"
    assert candidate.drafter.name == f"eagle3:{tmp_path.name}", "beside another one of its kind"
    (warning,) = candidate.warnings
    assert "another target (a/b)" in warning
