"""Templates that make much of little: one operation that would take all time or all memory is refused (class 3)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from slipstream.text.template import ChatTemplate

TWICE = (
    "{% set ns = namespace(a=[0], b=[0]) %}"
    "{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
"""Two lists that are small, and would be longer than anything if they were written out."""
DOUBLED = {
    name: TWICE + source
    for name, source in {
        "output": "{{ ns.a }}", "namespace": "{{ ns }}", "json": "{{ ns.a | tojson }}", "equal": "{{ ns.a == ns.b }}",
        "less": "{{ ns.a < ns.b }}", "test": "{{ ns.a is eq ns.b }}", "in": "{{ ns.a in [ns.b] }}",
        "count": "{{ [ns.b].count(ns.a) }}", "index": "{{ [ns.b].index(ns.a) }}", "items": "{{ {1: ns.a}.items() }}",
        "tilde": "{{ ns.a ~ 'x' }}", "upper": "{{ ns.a | upper }}", "percent": "{{ '%s' % ns.a }}",
        "format": "{{ '{}'.format(ns.a) }}", "string": "{{ (ns.a | string) | length }}",
        "sort": "{{ [ns.a, ns.b] | sort }}",
        "unique": "{{ [ns.a, ns.b] | unique | list | length }}", "pprint": "{{ ns.a | pprint | length }}",
        "changed": "{% for x in [ns.a, ns.b] %}{{ loop.changed(x) }}{% endfor %}",
        "error": "{{ raise_exception(ns.a) }}",
        "mapped": "{{ [ns.a] | map('string') | list | length }}", "select": "{{ [ns.a] | select('eq', ns.b) | list }}",
    }.items()
}  # fmt: skip
TUPLES = {
    "key": "{% set ns = namespace(a=(0,)) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}"
    "{{ {ns.a: 1} }}",
    "item": "{% set ns = namespace(a=(0,)) %}"
    "{% for i in range(60) %}{% set ns.a = ({ns.a: ns.a} | items | list)[0] %}{% endfor %}{{ {}[ns.a] }}",
}
ONCE = {
    "sum": "{{ ([range(100) | list] * 100000) | sum(start=[]) | length }}",
    "sort": "{% set a = [1] * 10000000 %}{% set b = [1] * 10000000 %}{{ ([a, b] * 50000) | sort | length }}",
    "join": "{{ (['x' * 1000000] * 100000) | join | length }}", "joins": "{{ ('x' * 1000000).join(['a'] * 90000) }}",
    "joined": "{{ range(100000) | join('x' * 1000000) | length }}",
    "attribute": "{% set n = namespace(b='x' * 10000000) %}{{ ([n] * 100000) | map(attribute='b') | join | length }}",
    "replaced": "{{ ('x' * 1000000) | replace('x', 'y' * 100000) | length }}",
    "replace": "{{ ('x' * 1000000).replace('x', 'y' * 100000) | length }}",
    "indent": "{{ ('x\n' * 1000000) | indent(90000) | length }}", "format": "{{ '{:>999999999}'.format(1) | length }}",
    "formats": "{{ ('{0}' * 1000).format('x' * 16000000) | length }}",
    "percents": "{{ (('%(a)s' * 1000) % {'a': 'x' * 16000000}) | length }}",
    "bytes": "{{ 'x'.encode().ljust(9000000000) | length }}", "to_bytes": "{{ (1).to_bytes(9000000000) | length }}",
    "tabs": "{{ ('\t' * 1000000).expandtabs(90000) | length }}", "numbers": "{{ (9 * 9) ** 99999999 }}",
    "translate": "{{ ('x' * 1000000).translate({120: 'y' * 100000}) | length }}",
    "squares": "{% set n = namespace(a=9) %}{% for i in range(40) %}{% set n.a = n.a * n.a %}{% endfor %}{{ n.a > 5 }}",
    "wide JSON": "{{ ([[[1]]] * 1000) | tojson(indent=90000) }}", "batch": "{{ [1] | batch(999999999) | list }}",
    "block": "{% set x %}{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endset %}{{ x | length }}",
}  # fmt: skip
BOMBS = {**DOUBLED, **{f"tuple {name}": source for name, source in TUPLES.items()}, **ONCE}
PROGRAM = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from slipstream.text import template
from slipstream.text.sandbox import TemplateError
template.MAX_SECONDS = 1.0
for name, source in json.load(sys.stdin).items():
    try:
        found = template.ChatTemplate(source).render([{"role": "user", "content": "x"}])
    except TemplateError as error:
        found = str(error)
    print(json.dumps([name, found[:200]]), flush=True)
"""


def test_every_bomb_is_refused() -> None:
    """In a process with little memory. That some take until the limit of time is as good."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(BOMBS), capture_output=True, text=True, timeout=120
    )
    ends = dict(json.loads(line) for line in done.stdout.splitlines())
    assert list(ends) == list(BOMBS), done.stderr
    assert not {name: found for name, found in ends.items() if not found.startswith("chat template: ")}
    assert not {name: found for name, found in ends.items() if "Memory" in found}


WORKS = {
    "{{ messages | tojson(indent=1) }}": '[\n {\n  "role": "user",\n  "content": "a b"\n }\n]',
    "{{ messages[0] == {'role': 'user', 'content': 'a b'} }}": "True",
    "{{ (1, 2) in {(1, 2): 3} }}{{ {'a': (1, 2)}['a'] }}": "True(1, 2)",
    "{{ [3, 1, 2] | sort | join(', ') }}{{ [1, 2] | sum }}{{ ['a'] * 3 }}": "1, 2, 33['a', 'a', 'a']",
    "{{ messages[0].content.split(' ') | map('upper') | list }}{{ 1 < 2 < 3 }}": "['A', 'B']True",
    "{% for a, b in {'x': 1}.items() %}{{ a ~ b }}{% endfor %}{{ '%s-%d' % ('a', 2) }}": "x1a-2",
    "{{ '{}{b}'.format(1, b=messages) }}": "1[{'role': 'user', 'content': 'a b'}]",
    "{{ 1234567 | round }}{{ 1.5 | round(0, 'floor') }}{{ 1000000 * 7 }}": "12345671.07000000",
    "{{ messages[0].content | replace('a', 'bb') | indent(2) | trim }}{{ -1 if not [] else 0 }}": "bb b-1",
    "{{ messages | map(attribute='role') | unique | list }}{{ 'b' is in 'abc' }}": "['user']True",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}": "1",
    "{{ dict(a=1) | items | list }}{{ ' '.join(['a', 'b']) }}": "[('a', 1)]a b",
    "{% macro m(x) %}<{{ x.content }}>{% endmacro %}{{ m(messages[0]) }}": "<a b>",
}


@pytest.mark.parametrize("source", WORKS)
def test_what_templates_do_is_still_done(source: str) -> None:
    assert ChatTemplate(source).render([{"role": "user", "content": "a b"}]) == WORKS[source]
