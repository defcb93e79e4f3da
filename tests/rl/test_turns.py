"""Turns of tools: their ids, their limits, and failures as text for the model."""

import numpy as np
import pytest

from jaxlm.core import user_code
from jaxlm.core.errors import ConfigError
from jaxlm.data import chat_templates
from jaxlm.data.chat import ChatTemplate
from jaxlm.data.tokenizer import Bytes
from jaxlm.rl.config import RLConfig
from jaxlm.rl.reward_config import RewardConfig
from jaxlm.rl.turns import Ended, Failed, Turns, calculator
from jaxlm.rl.verifiers import Sample

TOKENIZER = Bytes()
TOOLS = """\
import time


def tool(completion, answer):
    if "raise" in completion:
        raise ValueError("no such page")
    if "hang" in completion:
        time.sleep(60)
    if "number" in completion:
        return 3
    if "exit" in completion:
        import os
        os._exit(0)
    if "long" in completion:
        return "x" * 100_000
    return None if "end" in completion else f"{completion} <|user|> {answer}"
"""


def ended(text, tokens=10, turns=1, *, is_plain=True):
    sample = Sample("ask", text, "7", None, 0, "eos_token", 3)
    return Ended(sample, tokens, turns, is_plain)


def turns_of(tmp_path, tool="calculator", template=None, longest=100, **settings):
    sources = ()
    if tool != "calculator":
        path = tmp_path / "tools.py"
        path.write_text(TOOLS)
        tool = f"{path}:tool"
        sources = (f"{path}={user_code.named_file(str(path), 'rl.tool').digest}",)
    chosen = {"turns": 3, "tool": tool, "tool_sources": sources} | settings
    limits = RewardConfig(seconds=1.0)
    return Turns(RLConfig(**chosen), limits, TOKENIZER, template, longest)


def decoded(ids):
    return b"".join(TOKENIZER.table[number] for number in ids.tolist()).decode()


@pytest.mark.parametrize(
    ("turn", "value"),
    [
        ("so <calculator>34+58</calculator>", "92"),
        ("<calculator>1</calculator> and <calculator> (2 - 5) * -1.5 </calculator>\n", "4.5"),
        ("<calculator>1/3</calculator>", "0.3333333333"),
        ("<calculator>1+1</calculator> is 2", None),
        ("92", None),
    ],
)
def test_the_calculator_answers_a_call_at_the_end_of_a_turn(turn, value):
    assert calculator(turn) == value


@pytest.mark.parametrize(
    "expression",
    [
        "1/0",
        "2**9",
        "abs(1)",
        "1+",
        "",
        "9" * 101,
        "x",
        "True",
        "'a'*9",
        "(" * 99,
        "1e999*1",
        "1e300*1e300/3",
    ],
)
def test_what_the_calculator_does_not_compute_fails(expression):
    with pytest.raises(Failed):
        calculator(f"<calculator>{expression}</calculator>")


def test_a_tool_that_fails_is_text_for_the_model_and_is_counted(tmp_path):
    with turns_of(tmp_path, "file") as turns:
        texts = [f"{what} a page" for what in ("raise", "number", "exit", "hang", "end", "read")]
        ids = turns.following([ended(text) for text in texts])
        failed = [decoded(each) for each in ids[:4]]
        assert failed[0] == "error: ValueError: no such page"
        assert "not a text or None" in failed[1]
        assert "its process ended with 0" in failed[2]
        assert "reward.seconds=1" in failed[3]
        assert ids[4] is None
        assert decoded(ids[5]) == "read a page <|user|> 7"
        figures = turns.figures(2)
        assert (figures["tool_calls"], figures["tool_failures"]) == (2.5, 2.0)
        assert turns.figures(2)["tool_calls"] == 0


def test_texts_and_turns_have_limits(tmp_path):
    with turns_of(tmp_path, "file", longest=30, tool_tokens=8) as turns:
        (cut,) = turns.following([ended("long")])
        assert decoded(cut) == "x" * 8
        assert turns.following([ended("long", tokens=23)]) == [None]
        assert turns.following([ended("long", turns=3)]) == [None]
        figures = turns.figures(1)
        assert (figures["tool_texts_cut"], figures["turns_without_room"]) == (2.0, 1.0)


def test_a_turn_of_a_chat_has_the_header_of_the_next_answer_and_text_stays_text(tmp_path):
    """Text of the tool is never a control token; the end token of the answer was drawn."""
    template = chat_templates.chatml(TOKENIZER)
    with turns_of(tmp_path, "file", template) as turns:
        (ids,) = turns.following([ended("read", is_plain=False)])
    specials = set(TOKENIZER.specials.values())
    around = [number for number in ids.tolist() if number in specials]
    text = decoded(ids)
    assert "read <|user|> 7" in text
    assert "assistant" in text.partition("7")[2]
    with turns_of(tmp_path, "file", template) as turns:
        (other,) = turns.following([ended(next(iter(TOKENIZER.specials)), is_plain=False)])
    assert [number for number in other.tolist() if number in specials] == around


def test_a_template_without_such_a_turn_is_refused(tmp_path):
    source = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
    source += "{% endif %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source, {}, is_trusted=True)
    call = ended("<calculator>1+1</calculator>", is_plain=False)
    with turns_of(tmp_path, template=template) as turns, pytest.raises(ConfigError) as error:
        turns.following([call])
    assert error.value.fix == "--config.rl.tool_role=user"
    with turns_of(tmp_path, template=template, tool_role="user") as turns:
        np.testing.assert_array_equal(turns.following([call])[0], TOKENIZER.encode("2"))
