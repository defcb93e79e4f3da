"""Chat templates render conversations, and hostile ones are refused."""

import dataclasses
import time

import pytest

from jaxlm.core.errors import DataError
from jaxlm.data import sandbox
from jaxlm.data.chat import ChatTemplate, render_chat
from tests import machine
from tests.data.chat_templates import BRACKETS, CHATML, CONVERSATIONS, TEMPLATES, TOKENS, TOOL


def test_turns_are_put_between_the_marks_of_the_template():
    asked, answered = render_chat(CONVERSATIONS, ChatTemplate(CHATML, {}))
    assert asked == (
        "<|im_start|>system\nYou are helpful.<|im_end|>\n"
        "<|im_start|>user\n  Hello, \u6f22\u5b57 \U0001f600 <b>&amp;</b>\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert answered.count("<|im_start|>") == 5
    whole = render_chat(CONVERSATIONS, ChatTemplate(CHATML, {}), add_generation_prompt=False)
    assert answered == whole[1] + "<|im_start|>assistant\n"


def test_named_tokens_and_keyword_arguments_are_variables_of_the_template():
    (text,) = render_chat(CONVERSATIONS[1:], ChatTemplate(BRACKETS, TOKENS))
    assert text.startswith("<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n1 + 1 = ? [/INST] 2 </s>")
    (text,) = render_chat(CONVERSATIONS[:1], ChatTemplate(TEMPLATES["tools"], TOKENS), tools=[TOOL])
    assert text.startswith('# Tools\n{\n  "type": "function"')
    assert "caf\u00e9" in text


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_trusted_template_is_rendered_in_this_process_to_the_same_text(name, monkeypatch):
    tools = [TOOL] if name == "tools" else None
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    expected = render_chat(CONVERSATIONS, template, tools=tools)
    monkeypatch.setattr(sandbox.subprocess, "Popen", None)
    trusted = dataclasses.replace(template, is_trusted=True)
    assert render_chat(CONVERSATIONS, trusted, tools=tools) == expected


HOSTILE = {
    "attributes": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "attributes by filter": "{{ (messages | attr('__class__')).__mro__ }}",
    "globals of a function": "{{ raise_exception.__globals__['sys'] }}",
    "a format string": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "change": "{{ messages.append(1) }}",
    "a long range": "{% for i in range(10**9) %}x{% endfor %}",
    "a file": "{% include '/etc/passwd' %}",
    "no end of itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "not a template": "{% for %}",
    "an unknown tag": "{% clever %}",
    "refuses": "{{ raise_exception('no') }}",
}
GREEDY = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "memory": "{{ ('a' * 10**10) | length }}",
    "memory by doubling": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "padding": "{{ 'a' | center(10**11) }}",
    "powers": "{{ 9**(9**9) }}",
}


@pytest.mark.parametrize("is_trusted", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_s7_a_template_that_reaches_out_is_refused(name, is_trusted):
    with pytest.raises(DataError, match="cannot be rendered"):
        render_chat(CONVERSATIONS, ChatTemplate(HOSTILE[name], TOKENS, "here", is_trusted))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("loops in loops", "memory") else pytest.mark.slow)
        for name in GREEDY
    ],
)
def test_s7_a_template_without_end_is_refused_in_time(name, monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    begun = time.monotonic()
    with pytest.raises(DataError, match="cannot be rendered"):
        render_chat(CONVERSATIONS, ChatTemplate(GREEDY[name], TOKENS))
    machine.require_clock(time.monotonic() - begun, 10)


def test_a_template_of_a_megabyte_is_refused():
    with pytest.raises(DataError, match="cannot be rendered") as caught:
        ChatTemplate("x" * (2**20 + 1), TOKENS, "hub/chat_template.jinja")
    assert caught.value.where == "hub/chat_template.jinja"
    assert caught.value.why == "it has 1,048,577 characters"


def test_the_reason_of_a_refusal_is_the_templates_own():
    with pytest.raises(DataError) as caught:
        render_chat([[{"role": "assistant", "content": "x"}]], ChatTemplate(BRACKETS, TOKENS))
    assert "roles must alternate" in caught.value.why
