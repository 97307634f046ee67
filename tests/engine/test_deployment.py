"""A drafter that is put to work while the engine runs, and taken back: then all is as it was before."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from slipstream.engine import Engine, load_model
from slipstream.engine.deployment import Deployment
from slipstream.engine.messages import Deploy
from slipstream.program.sampling import SamplingParams
from slipstream.speculation import Controller, SuffixDrafter
from tests.speculation.families import OPTIONS
from tests.speculation.folders import eagle3_folder

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def put_to_work(deployment: Deployment, engine: Engine, folder: Path) -> None:
    assert deployment.begin(Deploy(1, str(folder), "all", 1.0, False)) is None
    while (done := deployment.settle()) is None:
        engine.step()
    assert not done.problem


@pytest.mark.parametrize("controller", [None, Controller([SuffixDrafter()])])
def test_after_it_was_taken_back_all_is_as_before(
    controller: Controller | None, tiny_gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once its last answer has ended: no hidden states, steps planned ahead, the controller that there was."""
    model = load_model(str(tiny_gguf), OPTIONS)
    engine = Engine(model, controller=controller, ahead=True)
    deployment = Deployment(engine, "coupled")
    said: dict[int, list[int]] = {}

    def step() -> None:
        for chunk in engine.step():
            said.setdefault(chunk.request, []).extend(chunk.token_ids)

    for turn in range(2):
        put_to_work(deployment, engine, eagle3_folder(tmp_path / str(turn)))
        assert engine.model.executable is not model.executable
        numbers = [engine.add([1, 2, place], PARAMS) for place in range(3)]
        for _ in range(4):
            step()
        with caplog.at_level(logging.WARNING):
            assert deployment.begin(Deploy(2, "", "back", 1.0, False)) is not None
        assert "taken back: it was asked for" in caplog.text
        assert deployment.settle() is None
        assert engine.controller is deployment.rollout, "it still has answers"
        numbers.append(engine.add([1, 2, 9], PARAMS))
        while engine.busy:
            step()
            deployment.settle()
            if any(sequence.request in numbers[:3] for sequence in engine.sequences):
                assert engine.controller is deployment.rollout
        deployment.settle()
        assert engine.model is model
        assert engine.ahead
        assert engine.controller is controller
        stats = deployment.stats()
        assert stats is not None
        assert (stats.candidate, stats.outcome) == (str(tmp_path / str(turn)), "it was asked for")
    engine.check()
    bare = Engine(load_model(str(tiny_gguf), OPTIONS))
    for place, number in zip((0, 1, 2, 9), numbers, strict=True):
        alone = bare.add([1, 2, place], PARAMS)
        assert said[number] == [token for chunk in bare.run(alone) for token in chunk.token_ids]


def test_a_folder_that_cannot_be_loaded_changes_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    engine = Engine(load_model(str(tiny_gguf), OPTIONS), ahead=True)
    deployment = Deployment(engine, "coupled")
    assert deployment.begin(Deploy(1, str(tmp_path), "all", 1.0, False)) is None
    while (done := deployment.settle()) is None:
        pass
    assert done.problem
    assert engine.ahead
    assert engine.controller is None
    assert deployment.stats() is None
