"""Others' grammars: whether somebody uses a schema does not show by how soon another gets it (class 11)."""

from __future__ import annotations

import time

import pytest

from slipstream.engine import Engine, Model, Terms
from slipstream.engine import grammar as grammar_module
from slipstream.engine.desk import Desk
from slipstream.engine.messages import Submit
from slipstream.program.sampling import SamplingParams
from slipstream.text.grammars import of_lark, of_schema

SCHEMA = of_schema({"type": "object", "properties": {"secret": {"type": "integer"}}})
PARAMS = SamplingParams(grammar=SCHEMA, max_tokens=8, temperature=0.0)
OWNER = Terms(tenant="a", cache_salt="b")
OTHERS = [
    Terms(tenant="x", cache_salt="b"), Terms(tenant="a", cache_salt="x"), Terms(tenant="ab"), Terms(cache_salt="ab"),
]  # fmt: skip


class Test11OthersGrammars:
    @pytest.mark.parametrize("other", OTHERS)
    def test_each_waits_for_his_own(self, tiny_model: Model, other: Terms, monkeypatch: pytest.MonkeyPatch) -> None:
        """What one compiled is compiled again for another, who waits for it at the desk like the first; only once."""
        compiled, compile_it = list[object](), grammar_module.matcher_of
        monkeypatch.setattr(grammar_module, "matcher_of", lambda *of: compiled.append(of) or compile_it(*of))
        engine = Engine(tiny_model)
        desk = Desk(engine.grammars)

        def asks(terms: Terms) -> tuple[int, str]:
            """How many grammars are compiled for it, while it waits at the desk, and what is said."""
            before, end = len(compiled), time.monotonic() + 60
            if not desk.take(Submit(1, [1, 2, 3], PARAMS, terms)):
                while not (done := desk.done()) and time.monotonic() < end:
                    time.sleep(0.001)
                assert [problem for _, problem in done] == [""]
            at_the_desk = len(compiled) - before
            text = "".join(chunk.text for chunk in engine.run(engine.add([1, 2, 3], PARAMS, terms)))
            assert len(compiled) - before == at_the_desk, "the engine finds what the desk has"
            return at_the_desk, text

        first, text = asks(OWNER)
        assert first == 1
        assert asks(OWNER) == (0, text)
        assert asks(other) == (1, text)
        assert asks(other) == asks(OWNER) == (0, text)

    def test_one_that_cannot_go_back_is_so_for_all(self, tiny_model: Model) -> None:
        """Nobody drafts under it, whoever asked first."""
        grammars, lark = Engine(tiny_model).grammars, of_lark("start: name\nname[max_tokens=5]: /[a-z]*/")
        assert {grammars.constraint(lark, terms.whose).draftable for terms in (OWNER, *OTHERS)} == {False}
