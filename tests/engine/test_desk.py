"""Grammars are compiled in turns, given up when they take too long, and forgotten with who asked for them."""

from __future__ import annotations

import threading
import time

import pytest

from slipstream.engine import desk as desk_module
from slipstream.engine.desk import Desk
from slipstream.engine.messages import Submit
from slipstream.engine.request import Terms, Whose
from slipstream.errors import UsageError
from slipstream.program.sampling import SamplingParams


class Compiler:
    """Stands for the grammars: what it compiles ends when it is let."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.known: set[str] = set()
        self.gates: dict[str, threading.Event] = {}

    def knows(self, grammar: str, whose: Whose) -> bool:
        return grammar in self.known

    def learn(self, grammar: str, whose: Whose) -> None:
        self.order.append(grammar)
        self.gates.setdefault(grammar, threading.Event()).wait(10)
        if grammar.startswith("bad"):
            raise UsageError(f"{grammar} is wrong")
        self.known.add(grammar)

    def let(self, grammar: str) -> None:
        self.gates.setdefault(grammar, threading.Event()).set()


def asked(number: int, grammar: str, tenant: str = "") -> Submit:
    return Submit(number, [1], SamplingParams(grammar=grammar), Terms(tenant=tenant))


def until(desk: Desk, count: int) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    end = time.monotonic() + 10
    while len(found) < count and time.monotonic() < end:
        found += [(request.number, problem) for request, problem in desk.done()]
        time.sleep(0.002)
    return found


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def desk(compiler: Compiler) -> Desk:
    return Desk(compiler)  # type: ignore[arg-type]


def test_tenants_take_turns(desk: Desk, compiler: Compiler) -> None:
    for number in range(4):
        assert not desk.take(asked(number, f"a{number}", "many"))
    assert not desk.take(asked(9, "b", "one"))
    assert desk.waiting == 5
    for name in ("a0", "a1", "a2", "a3", "b"):
        compiler.let(name)
    assert until(desk, 5) == [(0, ""), (1, ""), (9, ""), (2, ""), (3, "")]
    assert compiler.order == ["a0", "a1", "b", "a2", "a3"]
    assert not desk.waiting
    assert desk.take(asked(10, "a2"))
    assert desk.take(asked(11, ""))


def test_what_takes_too_long_is_given_up(desk: Desk, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "MOST_SECONDS", 0.05)
    assert not desk.take(asked(1, "slow"))
    assert not desk.take(asked(2, "quick", "another"))
    [(number, problem)] = until(desk, 1)
    assert number == 1
    assert "longer than 0.05 s" in problem
    assert desk.waiting, "the other one still does"
    compiler.let("quick")
    assert desk.done() == [], "the thread is not free yet"
    compiler.let("slow")
    assert until(desk, 1) == [(2, "")]
    assert not desk.waiting


def test_wrong_ones_and_those_whose_client_left(desk: Desk, compiler: Compiler) -> None:
    for number, name in enumerate(("bad", "left", "gone", "last")):
        desk.take(asked(number, name))
    assert desk.drop(2)
    assert not desk.drop(2)
    compiler.let("bad")
    assert until(desk, 1) == [(0, "bad is wrong")]
    while compiler.order != ["bad", "left"]:
        desk.done()
    assert desk.drop(1)
    compiler.let("left")
    compiler.let("last")
    assert until(desk, 1) == [(3, "")]
    assert compiler.order == ["bad", "left", "last"]
    assert not desk.waiting
