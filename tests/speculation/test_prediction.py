"""S as it is foreseen beside S as it comes, over batch, context, length and luck, on a machine that costs what is said.

Seconds are those of the cost model, so that nothing here depends on a clock: what is left is whether the controller
knows what its drafts bring, and whether it leaves them where they bring nothing. `bench spec` measures the rest.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from slipstream.kvcache import BlockPool
from slipstream.program import BLOCK_SLOTS, KVFormat, Namespace, StepShape
from slipstream.program.sampling import SamplingParams
from slipstream.roofline.cost import CostModel, Curve
from slipstream.scheduling import Limits, State, schedule
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation import Controller
from slipstream.speculation.statistics import Pace
from tests.speculation.test_controller import Luck, Text

# 10 ms a step up to four rows, then 1 ms a row; reading the cache and attention on top.
COST = CostModel(
    Curve((1, 4, 256), (9e-3, 10e-3, 262e-3)), Curve((1, 64), (1e-3, 2e-3)), (0.0, 0.0, 1e-8, 1e-12), drafted=1e-4
)
KV_BYTES = 20_000
WARM_UP, STEPS = 150, 800


class Machine:
    """A batch of answers under the real planner; each draft token holds with the same chance."""

    def __init__(self, controller: Controller, batch: int, context: int, chance: float, real: CostModel = COST):
        """`real` is what steps take, whatever the controller is told."""
        self.real = real
        self.controller, self.chance, self.random = controller, chance, random.Random(f"{batch} {context} {chance}")
        self.pool = BlockPool(batch * (context // BLOCK_SLOTS + 600))
        params, namespace = SamplingParams(temperature=0.0), Namespace("", "", KVFormat.BF16)
        self.answers = [
            Answer(
                n, 0, [1] * context, context, params, 0, frozenset(), 1 << 30, namespace, computed=context - 1,
                blocks=self.pool.take(-(-context // BLOCK_SLOTS)),
            )
            for n in range(batch)
        ]  # fmt: skip
        self.pace, self.plain, self.taken = Pace(), 0.0, 0.0

    def shape(self, drafts: int) -> StepShape:
        rows, tokens = len(self.answers) + drafts, sum(len(answer.tokens) for answer in self.answers)
        return StepShape(rows, rows, tokens * KV_BYTES, tokens * rows // len(self.answers))

    def step(self) -> None:
        controller, answers = self.controller, self.answers
        offers = controller.offers(answers, COST)
        neural = sum(offer.neural for offer in offers.values())
        each = controller.draft_pass(neural) if neural else 0.0
        plan = schedule(State(0.0, answers, self.pool, Limits(256), {}, COST, KV_BYTES, offers=offers, draft_pass=each))
        drafts = controller.draft(plan) if offers else {}
        passes = max((len(draft) for draft in drafts.values()), default=0) if neural else 0
        taken = self.real.seconds(self.shape(sum(map(len, drafts.values())))) + passes * each
        taken += self.real.drafted if drafts else 0.0
        bare, tokens = COST.seconds(self.shape(0)), 0
        for span in plan.spans:
            answer, held = span.sequence, 0
            answer.blocks.extend(self.pool.take(max(0, -(-(answer.computed + 20) // BLOCK_SLOTS) - len(answer.blocks))))
            if (draft := drafts.get(id(answer))) is not None:
                while held < len(draft) and self.random.random() < self.chance:
                    held += 1
                controller.landed(answer, draft, range(held), ended=False)
            answer.tokens += [1] * (held + 1)
            answer.computed += held + 1
            tokens += held + 1
        self.plain += bare * tokens / len(answers)
        self.taken += taken
        if drafts:
            self.pace.add(taken, bare * tokens / len(answers), plan.speedup)

    def run(self, steps: int) -> None:
        self.pace, self.plain, self.taken = Pace(), 0.0, 0.0
        for _ in range(steps):
            self.step()


@pytest.mark.parametrize("drafter", [Luck, Text])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("context", [64, 4000])
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_what_is_foreseen_comes(drafter: type[Luck], chance: float, context: int, batch: int) -> None:
    machine = Machine(Controller([drafter()]), batch, context, chance)
    machine.run(WARM_UP)
    machine.run(STEPS)
    assert machine.plain / machine.taken >= 0.97, "nothing stays switched on where it does not pay"
    if machine.pace.steps > STEPS // 4:
        foreseen, came = machine.pace.predicted_speedup, machine.pace.measured_speedup
        assert foreseen == pytest.approx(came, rel=0.1)
    if batch == 1 and chance >= 0.8:
        assert machine.plain / machine.taken > 1.3


def test_a_wrong_price_is_seen() -> None:
    """Rows that take twice what is said of them: what comes is not what was foreseen."""
    dear = replace(COST, body=Curve((1, 4, 256), (9e-3, 12e-3, 516e-3)))
    machine = Machine(Controller([Luck()]), 1, 64, 0.9, dear)
    machine.run(WARM_UP)
    machine.run(STEPS)
    assert machine.pace.predicted_speedup > 1.1 * machine.pace.measured_speedup
