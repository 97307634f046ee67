"""Deployment: a drafter is loaded while the engine runs, put to work between two steps, and taken back if need be."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from slipstream.engine.drafters import Candidate, load_candidate
from slipstream.engine.engine import Engine
from slipstream.engine.messages import ArmStats, Deploy, Deployed, RolloutStats
from slipstream.errors import SlipstreamError
from slipstream.speculation import Controller
from slipstream.speculation.rollout import STAGES, Arm, Rollout
from slipstream.speculation.settings import Drawing


@dataclass
class _Loading:
    """A drafter on its way."""

    wanted: Deploy
    thread: threading.Thread
    found: Candidate | None = None
    problem: str = ""


class Deployment:
    """The engine's drafters, as they change. Everything but the loading happens on the engine's thread."""

    def __init__(self, engine: Engine, drawing: Drawing | None):
        self._engine, self._drawing = engine, drawing
        self._loading: _Loading | None = None
        self._name = self._before = ""
        self._begun_with = engine.controller, engine.model, engine.ahead
        self.rollout: Rollout | None = None
        """The rollout that there is or was last."""

    @property
    def loading(self) -> bool:
        """Whether a drafter is being loaded: the engine must not sleep for long then."""
        return self._loading is not None

    @property
    def _under_way(self) -> Rollout | None:
        """The rollout that the engine drafts by."""
        return self.rollout if self.rollout is not None and self._engine.controller is self.rollout else None

    def begin(self, wanted: Deploy) -> Deployed | None:
        """Begin to load, or change a stage; what there is to say at once, if there is."""
        if wanted.stage not in (*STAGES, "back"):
            return Deployed(wanted.number, f"a stage is {', '.join(STAGES)} or back, not {wanted.stage!r}", [])
        if not wanted.folder:
            return Deployed(wanted.number, self._change(wanted), [])
        if wanted.stage == "back":
            return Deployed(wanted.number, "to take a drafter back, name no folder", [])
        if self._loading is not None:
            return Deployed(wanted.number, "another drafter is being loaded; wait for it", [])
        loading = _Loading(wanted, threading.Thread(target=self._load, name="loader", daemon=True))
        self._loading = loading
        loading.thread.start()
        return None

    def _change(self, wanted: Deploy) -> str:
        rollout = self.rollout
        if rollout is None:
            return "no drafter was deployed; name its folder"
        if wanted.stage == "back":
            rollout.take_back("it was asked for")
            return ""
        if rollout.outcome is not None:
            return f"the drafter was taken back ({rollout.outcome}); deploy it anew"
        for stage in STAGES:
            if stage == wanted.stage:
                rollout.advance(stage)
        rollout.share, rollout.auto = wanted.share, wanted.auto
        return ""

    def _load(self) -> None:
        loading = self._loading
        assert loading is not None
        try:
            loading.found = load_candidate(Path(loading.wanted.folder), self._engine.model, self._drawing)
        except SlipstreamError as error:
            loading.problem = str(error)
        except Exception as error:  # whatever is in that folder, the engine goes on
            loading.problem = f"it cannot be loaded: {type(error).__name__}: {error}"

    def settle(self) -> Deployed | None:
        """Between two steps: put a loaded drafter to work. What there is to say about it, once there is."""
        loading = self._loading
        if loading is None:
            self._end()
            return None
        if loading.thread.is_alive():
            return None
        if loading.found is None:
            self._loading = None
            return Deployed(loading.wanted.number, loading.problem, [])
        self._engine.ahead = False
        if self._engine.flying:
            return None
        self._loading = None
        problem = self._put_to_work(loading.found, loading.wanted)
        if problem and self._under_way is None:
            self._engine.ahead = self._begun_with[2]
        return Deployed(loading.wanted.number, problem, [] if problem else list(loading.found.warnings))

    def _end(self) -> None:
        """With the last answer of a candidate that was taken back its hidden states are not needed any more."""
        rollout = self._under_way
        if rollout is not None and rollout.present.neural is None and rollout.over and not self._engine.flying:
            controller, model, ahead = self._begun_with
            self._engine.roll_out(controller, model, ahead=ahead)

    def _put_to_work(self, found: Candidate, wanted: Deploy) -> str:
        present = self._present()
        if present.neural is not None and present.neural.needs.taps != found.drafter.needs.taps:
            return "the present drafter reads other layers of the target than this one: restart with --speculative"
        stage = next(stage for stage in STAGES if stage == wanted.stage)
        if self.rollout is not None and present is self.rollout.candidate:
            self._before = self._name
        self._hand_over(present)
        rollout = Rollout(
            present, found.drafter, found.card, stage, wanted.share, auto=wanted.auto, under_way=self._engine.sequences
        )
        self._engine.roll_out(rollout, found.model)
        self.rollout = rollout
        self._name = wanted.folder
        return ""

    def _present(self) -> Controller:
        """What drafts now: of a rollout the candidate if it drafts for all, otherwise the drafter beside it."""
        controller, rollout = self._engine.controller, self._under_way
        if rollout is None:
            return controller if controller is not None else Controller([])
        return rollout.candidate if rollout.outcome is None and rollout.stage == "all" else rollout.present

    def _hand_over(self, present: Controller) -> None:
        """Answers under way that another drafter drafts for become this one's, which has no state of them."""
        rollout = self._under_way
        if rollout is None:
            return
        for answer in self._engine.sequences:
            owner = rollout.owner(answer)
            if owner is not present:
                if owner.neural is not None:
                    owner.neural.free(answer, learn=False)
                answer.drafted = 0

    def stats(self) -> RolloutStats | None:
        """For whoever looks on."""
        rollout = self.rollout
        if rollout is None:
            return None
        present, new = (_arm(rollout.arms[name]) for name in ("present", "candidate"))
        return RolloutStats(
            self._name, rollout.stage, rollout.share, rollout.auto, rollout.outcome, present, new, self._before
        )  # fmt: skip


def _arm(arm: Arm) -> ArmStats:
    return ArmStats(len(arm.answers), arm.rounds, arm.tau, arm.lower)
