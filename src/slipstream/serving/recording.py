"""Recording: what of a request and its answers goes into the traffic file, when all has gone well."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.engine.output import Chunk
from slipstream.engine.request import Terms
from slipstream.program.sampling import SamplingParams
from slipstream.training.recorder import Recorder
from slipstream.training.records import Record, settings_of


@dataclass(frozen=True, slots=True)
class Served:
    """What answers come from: the target as records call it, the hash of its chat template."""

    target: str = ""
    template: str = ""


@dataclass
class Recording:
    """Hears the chunks of one HTTP request, and records each choice that ends."""

    recorder: Recorder
    served: Served
    request: str
    work: Sequence[tuple[list[int], SamplingParams]]
    terms: Terms
    _answers: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)

    def hear(self, chunks: Sequence[Chunk]) -> None:
        """Chunks that came together are those of one step."""
        brought: dict[int, int] = {}
        for chunk in chunks:
            tokens, steps = self._answers.setdefault(chunk.choice, ([], []))
            tokens += chunk.token_ids
            brought[chunk.choice] = brought.get(chunk.choice, 0) + len(chunk.token_ids)
            if chunk.finish_reason in ("stop", "length"):
                steps.append(brought.pop(chunk.choice))
                self._keep(chunk.choice)
        for choice, count in brought.items():
            self._answers[choice][1].append(count)

    def _keep(self, choice: int) -> None:
        tokens, steps = self._answers.pop(choice)
        prompt, params = self.work[choice // self.work[0][1].n]
        if tokens:
            self.recorder.record(
                Record(
                    (*prompt, *tokens), ((len(prompt), len(prompt) + len(tokens)),), self.served.target,
                    self.served.template, self.terms.tag, self.terms.tenant, time.time(), self.request,
                    settings_of(params), tuple(steps),
                )
            )  # fmt: skip
