"""Chat templates give the text that transformers gives."""

import pytest

from jaxlm.data.chat import ChatTemplate, render_chat
from tests.data.chat_templates import CONVERSATIONS, TEMPLATES, TOKENS, TOOL

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("is_prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_that_of_apply_chat_template(name, is_prompt):
    import tokenizers
    import transformers

    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), **TOKENS
    )
    theirs.chat_template = TEMPLATES[name]
    tools = [TOOL] if name == "tools" else None
    ours = render_chat(
        CONVERSATIONS,
        ChatTemplate(TEMPLATES[name], TOKENS),
        add_generation_prompt=is_prompt,
        tools=tools,
    )
    for messages, text in zip(CONVERSATIONS, ours, strict=True):
        assert text == theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=is_prompt, tokenize=False
        )
        assert len(text) > 20
