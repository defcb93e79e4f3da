"""Ids and masks of conversations are those of transformers, whether the template has marks or not."""

import numpy as np
import pytest
import tokenizers as hf

from tests.data.chat_families import FAMILIES, template, tokenizer
from tests.data.test_assistant_mask import CONVERSATIONS, weighed

pytestmark = pytest.mark.parity


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
