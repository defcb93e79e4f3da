"""Ids and masks of conversations are those of transformers, with and without marks."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf

from jaxlm.data import chat_templates
from jaxlm.data.assistant_mask import MaskRenderer, Rendered
from jaxlm.data.chat import ChatTemplate
from jaxlm.data.control_tokens import ControlTokens
from tests.data.chat_families import FAMILIES, Family, template, tokenizer
from tests.data.test_assistant_mask import CONVERSATIONS, weighed

pytestmark = pytest.mark.parity
TRL = importlib.util.find_spec("trl")
FOLDERS = TRL.submodule_search_locations or [] if TRL is not None else []
TRAINING = sorted(f for each in FOLDERS for f in Path(each, "chat_templates").glob("*_training.*"))
CONTROL = re.compile(r"<\|?[\w\uff5c\u2581/|]+\|?>|\[/?[A-Z_]+\]")
PLAIN = re.compile(r"think|tool|parameter|function|TOOL|IMPORTANT")  # no control tokens there
IMAGES = ("idefics3", "llava_next", "smolvlm")  # whose contents are lists of parts


@pytest.mark.parametrize("has_marks", [True, False], ids=["marks", "none"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_mask_is_that_of_apply_chat_template(name, has_marks):
    transformers = pytest.importorskip("transformers")
    family = FAMILIES[name]
    content = tokenizer(family).content
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=hf.Tokenizer.from_buffer(content)
    )
    marked = template(family, has_marks=True)
    _, ours = weighed(family, has_marks=has_marks)
    for conversation, each in zip(CONVERSATIONS, ours, strict=True):
        answer = theirs.apply_chat_template(
            conversation.messages,
            chat_template=marked.source,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **marked.tokens,
        )
        assert answer["input_ids"] == each.ids.tolist()
        np.testing.assert_array_equal(answer["assistant_masks"], each.weights)


def spans(path):
    """Rendered conversations of a template of trl, with the spelling of its control tokens."""
    source = path.read_text()
    names = {n for n in CONTROL.findall(source) if not PLAIN.search(n)} - {"<eos>", "<bos>"}
    family = Family(source, "<eos>", "<bos>", tuple(sorted(names)))
    chosen = ChatTemplate(source, {"bos_token": "<bos>", "eos_token": "<eos>"}, path.name)
    chosen = ChatTemplate(chat_templates.dated(chosen), chosen.tokens, path.name)
    with MaskRenderer(chosen, ControlTokens(tokenizer(family))) as renderer:
        return renderer.render(CONVERSATIONS)


@pytest.mark.skipif(not TRAINING, reason="needs trl")
@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.name)
def test_what_is_trained_of_a_models_own_template_trl_trains_too(path):
    """trl's marks enclose headers and line ends too; ours do not."""
    template = path.with_name(path.name.replace("_training", ""))
    if not template.exists() or path.name.startswith(IMAGES):
        pytest.skip("trl has one form of it alone, or it reads images")
    compared = 0
    for conversation, ours, theirs in zip(CONVERSATIONS, spans(template), spans(path), strict=True):
        if not isinstance(theirs, Rendered):
            continue  # the template has no system role
        assert isinstance(ours, Rendered), ours
        answers = [m["content"] for m in conversation.messages if m["role"] == "assistant"]
        assert len(ours.spans) == len(answers)
        for span, answer in zip(ours.spans, answers, strict=True):
            assert answer.split("</think>")[-1].strip() in ours.text[span.start : span.stop]
        if ours.text != theirs.text:
            continue  # trl's keeps thoughts, or ends the last turn differently
        compared += 1
        trained = np.zeros(len(ours.text), bool)
        for span in theirs.spans:
            trained[span.start : span.stop] = True
        assert all(trained[span.start : span.stop].all() for span in ours.spans)
    assert compared or path.name.startswith(("glm4moe", "qwen3_5"))
