"""Chat templates: what they render, and that a bad one is an error and nothing else."""

from __future__ import annotations

import time

import pytest

from slipstream.text.sandbox import TemplateError
from slipstream.text.template import ChatTemplate

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]


def test_renders() -> None:
    assert ChatTemplate(CHATML).render(USER) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate("{{ messages | tojson }}").render(USER) == '[{"role": "user", "content": "hi"}]'
    assert ChatTemplate("{% generation %}a{% endgeneration %}").render([]) == "a"
    assert (
        ChatTemplate("{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}").render([])
        == "012"
    )


def test_users_may_write_braces_and_numbers() -> None:
    text = "{1234567} %9999999d {:>9999999}"
    source = "{{ messages[0]['content'] | indent(2) | trim }}{{ messages[0]['content'].replace('x', 'y') }}"
    assert ChatTemplate(source).render([{"role": "user", "content": text}]) == text * 2


BAD = {
    "syntax": "{% for %}",
    "attribute": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ messages.append.__globals__ }}",
    "mutation": "{{ messages.append(1) }}",
    "raise": "{{ raise_exception('no tools') }}",
    "endless": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "long loops": "{% for a in range(9999999999) %}{% endfor %}",
    "output": "{% for a in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    "repetition": "{{ 'x' * 99999999999 }}",
    "power": "{{ 9 ** 9 ** 9 ** 9 }}",
    "undefined": "{{ nothing.there }}",
    "division": "{{ 1 / 0 }}",
    "include": "{% include '/etc/passwd' %}",
    "length": "x" * (2 << 20),
    "format": "{{ '%99999999999d' % 1 }}",
    "format method": "{{ '{:>99999999999}'.format(1) }}",
    "format filter": "{{ '%99999999999d' | format(1) }}",
    "starred format": "{{ '%*d' % (99999999, 1) }}",
    "justified": "{{ 'x'.ljust(99999999999) }}",
    "centered": "{{ 'x' | center(99999999999) }}",
    "doubled": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "added": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "macros": "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(s='x') %}"
    "{% for i in range(99) %}{% set n.s = d(n.s) %}{% endfor %}",
    "replaced": "{% set n = namespace(s='x') %}"
    "{% for i in range(99) %}{% set n.s = n.s.replace('x', 'xxxx') %}{% endfor %}",
    "indented": "{{ 'x\\nx' | indent(99999999999) }}",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_templates_end_in_an_error(name: str) -> None:
    start = time.monotonic()
    with pytest.raises(TemplateError, match="chat template"):
        ChatTemplate(BAD[name]).render(USER)
    assert time.monotonic() - start < 30  # far more than the limit; it ends
