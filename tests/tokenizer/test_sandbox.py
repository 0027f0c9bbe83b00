"""R05: templates that reach out, mutate, or do not end. Each is refused with one line, quickly, and nothing has happened."""

import threading
import time

import pytest

from kvant.errors import TemplateError
from kvant.tokenizer.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi"}]

REACHING = {
    "class": "{{ ''.__class__ }}",
    "mro": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "item": "{{ ''['__class__'] }}",
    "computed": "{% set name = '__cla' ~ 'ss__' %}{{ ''[name] }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "function": "{{ dict['__func__'] }}",
    "self": "{{ range['__se' ~ 'lf__'] }}",
    "code": "{% macro m() %}{% endmacro %}{{ m['_fu' ~ 'nc'] }}",
    "loop": "{% for x in [1] %}{{ loop['_it' ~ 'erator'] }}{% endfor %}",
    "generator": "{{ (messages | map('length')).gi_frame }}",
    "mapped attribute": "{{ messages | map(attribute='__class__') | list }}",
    "sorted attribute": "{{ messages | sort(attribute='__class__') }}",
    "joined attribute": "{{ messages | join(', ', attribute='__class__') }}",
    "attr filter": "{{ '' | attr('__class__') }}",
    "format field": "{{ '{0.__class__}'.format('') }}",
    "format map": "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "format later": "{{ ['{0.__class__}'.format][0]('') }}",
    "namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "namespace keyword": "{{ namespace(**{'__class__': 1}) }}",
    "type": "{{ namespace.mro() }}",
    "self reference": "{{ self._TemplateReference__context }}",
    "block": "{% block b %}{{ self.b() }}{% endblock %}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "from": "{% from 'os' import system %}",
    "extends": "{% extends 'x' %}",
    "autoescape": "{% autoescape true %}{{ 1 }}{% endautoescape %}",
    "printed function": "{{ range }}",
    "printed namespace": "{{ namespace(a=1) }}",
    "called data": "{{ messages[0]() }}",
    "bytes": "{{ 'x'.encode() }}",
}

MUTATING = {
    "append": "{{ messages.append(1) }}",
    "clear": "{{ messages.clear() }}",
    "pop": "{{ messages[0].pop('role') }}",
    "update": "{{ messages[0].update({'role': 'system'}) }}",
    "setdefault": "{{ messages[0].setdefault('x', 1) }}",
    "item": "{% set messages[0].role = 'x' %}",
    "attribute": "{% set messages.x = 1 %}",
    "own list": "{% set l = [1] %}{{ l.extend([2]) }}",
}

ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loop": "{% for a in range(9999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "range": "{{ range(1000000000) | list }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "branching recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "product": "{{ 'a' * 1000000000 }}",
    "folded product": "{{ ('a' * 100000) * 100000 }}",
    "empty product": "{{ '' * 1000000000 }}{{ [] * 1000000000 }}{{ [1] * 1000000000 }}",
    "list product": "{% set l = [0] * 99999 %}{% for i in range(99999) %}{% set k = l * 99999 %}{% endfor %}",
    "doubling": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling plus": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling list": "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "nested list": "{% set ns = namespace(l=[1]) %}{% for i in range(50) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "nested tojson": "{% set ns = namespace(l=[1]) %}{% for i in range(50) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"
    "{{ ns.l | tojson }}",
    "nested compare": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(50) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "nested test": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(50) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a is eq(ns.b) }}",
    "nested hash": "{% set ns = namespace(a=(1,)) %}{% for i in range(50) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}"
    "{{ messages[0][ns.a] }}",
    "nested index": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(50) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ [ns.a].index(ns.b) }}",
    "deep": "{% set ns = namespace(l=[1]) %}{% for i in range(5000) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}",
    "replace": "{% set a = 'a' * 100000 %}{{ a | replace('a', a) }}",
    "join": "{{ (('a' * 100000) | list) | join('b' * 100000) }}",
    "join method": "{{ ('b' * 100000).join(('a' * 100000) | list) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent many": "{{ ('%s' * 10000) % ((('a' * 100000),) * 10000) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format nested": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "format filter": "{{ '%1000000000s' | format('x') }}",
    "format many": "{{ ('{0}' * 10000).format('a' * 100000) }}",
    "center": "{{ 'x'.center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "center filter": "{{ 'x' | center(1000000000) }}",
    "indent": "{{ ('a\n' * 90000) | indent('x' * 90000) }}",
    "json indent": "{{ [1] | tojson(indent=1000000000) }}",
    "json separators": "{{ ([1] * 90000) | tojson(separators=('x' * 90000, ':')) }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power again": "{{ 2 ** 4000 ** 2 }}",
    "multiplied": "{% set ns = namespace(n=9) %}{% for i in range(99999) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "round": "{{ 1.5 | round(1000000000) }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "batch": "{{ [1] | batch(1000000000, 1) | list }}",
    "date": "{{ strftime_now('%1000000000d') }}",
    "long date": "{{ strftime_now('%c' * 100000) }}",
    "backward search": "{% set a = 'a' * 4000000 %}{{ a.rfind('b' ~ a[:2000000]) }}",
    "strip": "{% set a = 'a' * 4000000 %}{{ a.strip('b' * 2000000 ~ 'a') }}",
    "trim": "{% set a = 'a' * 4000000 %}{{ a | trim('b' * 2000000 ~ 'a') }}",
    "split": "{{ ('a,' * 4000000).split(',') }}",
    "parentheses": "{{ " + "(" * 50000 + "1" + ")" * 50000 + " }}",
    "nested blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "long source": "x" * 1_000_000,
}


@pytest.mark.parametrize("name", REACHING)
def test_R05_reaching_for_internals_is_refused(name):
    with pytest.raises(TemplateError, match="chat template") as caught:
        ChatTemplate(REACHING[name]).render(MESSAGES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", MUTATING)
def test_R05_mutation_is_refused(name):
    messages = [dict(message) for message in MESSAGES]
    with pytest.raises(TemplateError, match="chat template"):
        ChatTemplate(MUTATING[name]).render(messages)
    assert messages == MESSAGES


@pytest.mark.parametrize("name", ENDLESS)
def test_R05_what_does_not_end_is_stopped_soon(name):
    started = time.perf_counter()
    with pytest.raises(TemplateError, match="chat template"):
        ChatTemplate(ENDLESS[name]).render(MESSAGES)
    assert time.perf_counter() - started < 8  # 2 s is the deadline; the machine may be busy


def test_R05_others_go_on_while_one_is_stopped():
    """The deadline is wall time of one rendering; another thread's rendering is not held up and not charged."""
    done = []
    endless = ChatTemplate("{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' * 999 }}{% endfor %}{% endfor %}")

    def run():
        with pytest.raises(TemplateError):
            endless.render(MESSAGES)
        done.append("stopped")

    thread = threading.Thread(target=run)
    thread.start()
    plain = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    texts = [plain.render(MESSAGES).text for _ in range(50)]
    thread.join(10)
    assert texts == ["Hi"] * 50 and done == ["stopped"]


def test_renderings_share_nothing():
    template = ChatTemplate("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}")
    assert [template.render(MESSAGES).text for _ in range(3)] == ["1"] * 3


def test_a_long_conversation_is_far_from_the_limits():
    talk = [{"role": "user", "content": "Lorem ipsum <|im_end|> " * 40}, {"role": "assistant", "content": "ok " * 200}] * 1000
    source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content | trim) + '<|im_end|>\n' }}{% endfor %}"
    started = time.perf_counter()
    rendered = ChatTemplate(source).render(talk)
    assert time.perf_counter() - started < 1
    assert rendered.text.count("<|im_start|>") == 2000 and len(rendered.content) == 2000
