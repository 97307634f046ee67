"""Import: exchanges of a log become records, with the answers as they are or made anew by the target.

A drafter learns what its target says, so answers of another model are made anew: many at a time, by the engine itself,
and in an order that is the file's, so that an import that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from slipstream.engine import Engine, Model
from slipstream.engine.cost import cost_model
from slipstream.errors import SlipstreamError, UsageError
from slipstream.program.sampling import SamplingParams
from slipstream.text.template import hash_of
from slipstream.training.logs import Exchange, Unread
from slipstream.training.records import Record, sampled_with, settings_of
from slipstream.training.store import TrafficStore, Which

STREAMS = 64
BATCH = 64
"""Answers made at a time, and records written at a time."""
MOST_ANSWER = 512
MOST_NAMED = 20
"""Lines that cannot be read of which the numbers are told."""
APART = 1e-3
"""Seconds between lines of a log that has no times: they are as old as the file, in its order."""

Item = Exchange | Record | Unread
"""What a log has."""

Progress = Callable[[int, int], None]


@dataclass
class Imported:
    """What came of an import."""

    records: int = 0
    tokens: int = 0
    known: int = 0
    """Records that were there already."""
    unusable: int = 0
    """Exchanges without an answer, too long, or that the template refuses; lines that cannot be read."""
    first_problem: str = ""
    unread: list[int] = field(default_factory=list)
    """The first lines that could not be read."""

    def refuse(self, problem: str) -> None:
        """Leave an exchange out."""
        self.unusable += 1
        self.first_problem = self.first_problem or problem

    def unreadable(self, item: Unread) -> None:
        """Leave a line out: one of thousands that is damaged, or half written, must not end an import."""
        self.refuse(f"line {item.line}: {item.problem}")
        if len(self.unread) < MOST_NAMED:
            self.unread.append(item.line)


@dataclass(frozen=True)
class Importer:
    """Turns exchanges into records of one target's traffic. `target` names it, as `target_of` does."""

    model: Model
    target: str
    store: TrafficStore
    tag: str = ""
    system: str = ""
    """What is said to the model before every conversation that has no system message."""
    written: float = 0.0
    """When the log was written: the time of what has none of its own."""

    def as_they_are(self, items: Iterable[Item], *, same_target: bool) -> Imported:
        """Take answers from the log. `same_target`: this very model made them, so that they can be learned from."""
        done, batch = Imported(), []
        for item in self._timed(items, done):
            record = item if isinstance(item, Record) else self._record(item, done, same_target=same_target)
            if record is None:
                continue
            batch.append(replace(record, tag=record.tag or self.tag))
            if len(batch) == BATCH:
                self._write(batch, done)
                batch = []
        self._write(batch, done)
        return done

    def _timed(self, items: Iterable[Item], done: Imported) -> Iterator[Exchange | Record]:
        """What can be read, and when it was. Not when it was answered anew: the newest is what is held out, and an
        import that was stopped and went on must come to the same.
        """
        for place, item in enumerate(items):
            if isinstance(item, Unread):
                done.unreadable(item)
            else:
                yield item if item.time else replace(item, time=self.written + APART * place)

    def anew(self, items: Iterable[Item], params: SamplingParams, most_tokens: int, progress: Progress) -> Imported:
        """Have the target answer, until its answers have `most_tokens`. Needs a model with room for many sequences.

        `params` are settings for exchanges that name none; one that has been answered before is not asked again.
        """
        engine = Engine(self.model, cost_model(self.model))
        done, begun = Imported(), 0
        under_way: dict[int, tuple[Exchange, list[int], SamplingParams, list[int]]] = {}
        ready: list[Record] = []
        source, made = self._askable(items, params, done), self.store.count(Which(target=self.target))[1]
        while True:
            while len(under_way) < STREAMS and made + begun < most_tokens:
                if (ask := next(source, None)) is None:
                    break
                exchange, prompt, chosen = ask
                under_way[engine.add(prompt, chosen)] = (exchange, prompt, chosen, [])
                begun += chosen.max_tokens or 0
            if not under_way:
                break
            for chunk in engine.step():
                exchange, prompt, chosen, answer = under_way[chunk.request]
                answer += chunk.token_ids
                if chunk.finish_reason is None:
                    continue
                del under_way[chunk.request]
                engine.timings.pop(chunk.request)
                begun -= chosen.max_tokens or 0
                made += len(answer)
                ready.append(self._made(exchange, prompt, answer, chosen))
                progress(min(made, most_tokens), most_tokens)
            if len(ready) >= BATCH:
                self._write(ready, done)
                ready = []
        self._write(ready, done)
        return done

    def _askable(
        self, items: Iterable[Item], params: SamplingParams, done: Imported
    ) -> Iterator[tuple[Exchange, list[int], SamplingParams]]:
        asked: set[int] = set()
        for item in self._timed(items, done):
            if isinstance(item, Record):
                done.refuse("a record has no text to be answered anew; import it as it is, or export it with --model")
                continue
            prompt = self._prompt(item, done)
            if prompt is None:
                continue
            seed = _seed_of(item.request, prompt)
            if seed in asked or self.store.answered(item.request, self.target, prompt):
                done.known += 1
                continue
            longest = min(item.max_tokens or params.max_tokens or MOST_ANSWER, self.model.max_len - len(prompt))
            try:
                chosen = replace(params, **sampled_with(item.settings), max_tokens=longest, seed=seed, stop=item.stop)
            except UsageError as error:
                done.refuse(str(error))
                continue
            asked.add(seed)
            yield item, prompt, chosen

    def _prompt(self, exchange: Exchange, done: Imported) -> list[int] | None:
        if exchange.problem:
            done.refuse(exchange.problem)
            return None
        try:
            if exchange.messages:
                messages = [dict(message) for message in exchange.messages]
                if self.system and messages[0]["role"] != "system":
                    messages.insert(0, {"role": "system", "content": self.system})
                prompt = self.model.chat_prompt(messages)
            else:
                prompt = self.model.tokenizer.encode(exchange.prompt)
        except SlipstreamError as error:
            done.refuse(str(error))
            return None
        if not prompt or len(prompt) + 2 > self.model.max_len:
            done.refuse(f"a prompt of {len(prompt)} tokens does not fit into {self.model.max_len}")
            return None
        return prompt

    def _record(self, exchange: Exchange, done: Imported, *, same_target: bool) -> Record | None:
        if exchange.answer is None and not exchange.problem:
            done.refuse("an exchange has no answer; have it made anew")
            return None
        prompt = self._prompt(exchange, done)
        if prompt is None:
            return None
        answer = self.model.tokenizer.encode(exchange.answer or "", add_bos=False)
        answer += self._end if exchange.messages and not exchange.cut else []
        tokens = [*prompt, *answer][: self.model.max_len]
        if len(tokens) <= len(prompt):
            done.refuse("an answer is empty")
            return None
        target = self.target if same_target else ""
        return Record(
            tuple(tokens), ((len(prompt), len(tokens)),), target, self._template, exchange.tag, "",
            exchange.time, exchange.request, exchange.settings,
        )  # fmt: skip

    def _made(self, exchange: Exchange, prompt: list[int], answer: list[int], params: SamplingParams) -> Record:
        return Record(
            (*prompt, *answer), ((len(prompt), len(prompt) + len(answer)),), self.target, self._template,
            exchange.tag or self.tag, "", exchange.time, exchange.request, settings_of(params),
        )  # fmt: skip

    @cached_property
    def _end(self) -> list[int]:
        """What ends an answer: of the tokens that end one, that which the template writes after it."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        written = self.model.chat_prompt(turns, add_generation_prompt=False)
        ends = [token for token in written if token in self.model.eos]
        return ends[-1:] or sorted(self.model.eos)[:1]

    @property
    def _template(self) -> str:
        return hash_of(self.model.tokenizer.chat_template)

    def _write(self, batch: list[Record], done: Imported) -> None:
        fresh = [record for record in batch if not self.store.has(record)]
        done.known += len(batch) - len(fresh)
        self.store.add(fresh)
        done.records += len(fresh)
        done.tokens += sum(record.answered for record in fresh)


def _seed_of(request: str, prompt: list[int]) -> int:
    """The same whenever it is asked for; another one for every request, so that answers do not share their noise."""
    return int.from_bytes(hashlib.blake2b(repr((request, prompt)).encode(), digest_size=8).digest())
