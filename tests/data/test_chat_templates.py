"""The template of a run: the model's, a file, or ChatML with control tokens of its tokenizer."""

import pytest

from jaxlm.core.errors import DataError, InputMissing
from jaxlm.data import chat_templates
from jaxlm.data.chat import ChatTemplate, render_chat
from jaxlm.data.tokenizer import SPECIALS, Bytes
from tests.data.chat_families import FAMILIES, tokenizer

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}


def chatml(encoder, messages=TURNS, **more):
    chosen = chat_templates.choose("auto", encoder, ())
    assert chosen.where == "chatml"
    return render_chat([messages], chosen, add_generation_prompt=False, **more)[0]


def test_chatml_of_a_tokenizer_made_here_uses_what_it_reserves():
    mid, last = SPECIALS[-2:]
    assert chatml(Bytes()) == f"<|bos|>{last}user{mid}a<|eos|>\n{last}assistant{mid}b<|eos|>\n"


def test_chatml_of_a_model_uses_its_own_marks_or_the_end_of_text():
    both = tokenizer(FAMILIES["chatml"])
    assert chatml(both).startswith("<|im_start|>user\na<|im_end|>\n")
    assert chatml(tokenizer(FAMILIES["zephyr"])).startswith("</s>user\na</s>\n")
    assert chatml(tokenizer(FAMILIES["mistral"])).startswith("<s></s>user\na</s>\n")


def test_chatml_renders_tools_and_their_calls():
    system = {"role": "system", "content": "Add."}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    text = chatml(Bytes(), [system, TURNS[0], called], tools=[{"name": "add"}])
    assert f"system{SPECIALS[-2]}Add.\n\n# Tools\n{{" in text
    assert text.count("Add.") == 1
    assert '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|eos|>\n' in text


def test_the_models_template_comes_first_and_a_file_before_it(tmp_path):
    hub = tmp_path / "hub"
    hub.mkdir()
    copy = chat_templates.keep(ChatTemplate("{{ eos_token }}", {"eos_token": "x"}), hub)
    for name, content in copy.items():
        (hub / name).write_bytes(content)
    chosen = chat_templates.choose("auto", Bytes(), (tmp_path / "none", hub))
    assert (chosen.source, chosen.tokens) == ("{{ eos_token }}", {"eos_token": "x"})
    assert chat_templates.choose("chatml", Bytes(), (hub,)).where == "chatml"
    (tmp_path / "own.jinja").write_text("{{ bos_token }}")
    chosen_file = chat_templates.choose(str(tmp_path / "own.jinja"), Bytes(), (hub,))
    assert (chosen_file.source, chosen_file.tokens) == ("{{ bos_token }}", {"eos_token": "x"})
    with pytest.raises(InputMissing, match="does not exist"):
        chat_templates.choose(str(tmp_path / "other.jinja"), Bytes(), ())


def test_a_template_by_todays_date_has_a_fixed_one(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text('{% if strftime_now is defined %}{{ strftime_now("%d %b %Y") }}{% endif %}')
    chosen = chat_templates.choose(str(path), Bytes(), ())
    assert render_chat([TURNS], chosen) == ["26 Jul 2024"]
    assert chat_templates.date_of(chosen) == "2024-07-26"
    repeated = ChatTemplate(chat_templates.dated(chosen), chosen.tokens)
    assert repeated.source == chosen.source
    uncommented = ChatTemplate(chosen.source.partition("\n")[2], chosen.tokens)
    assert "today" not in uncommented.source
    assert chat_templates.digest(uncommented) == chat_templates.digest(chosen)
    path.write_text("{% set form = '%d' %}{{ strftime_now(form) }}")
    with pytest.raises(DataError, match="depends on the date") as caught:
        chat_templates.choose(str(path), Bytes(), ())
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ %s }}",
        "\n  {%% if 1 %%}\n{{ %s }}\n{%% endif %%}\n",
        "{%% set f = '%%d' %%}{{ %s + strftime_now(f) }}",
    ],
)
def test_a_model_that_was_not_trained_here_has_the_same_date_on_every_day(source):
    raw = ChatTemplate(source % "strftime_now('%Y')", {})
    assert chat_templates.date_of(raw) == "2024-07-26"
    (text,) = render_chat([TURNS], raw)
    assert text.strip() in ("2024", "202426")
    if "(f)" not in source:
        assert render_chat([TURNS], ChatTemplate(chat_templates.dated(raw), {})) == [text]


def test_a_template_is_the_same_after_writing_and_reading():
    template = ChatTemplate("{{ x }}", {"bos_token": "\u20ac"})
    read = chat_templates.parsed(chat_templates.serialized(template), "x")
    assert chat_templates.digest(read) == chat_templates.digest(template)
    assert (read.source, read.tokens) == (template.source, template.tokens)
