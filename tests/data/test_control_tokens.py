"""Control tokens of a template become ids, and their spelling stays text, for every tokenizer."""

import numpy as np
import pytest
import tokenizers as hf

from jaxlm.data.control_tokens import ControlTokens, WeightedSpan
from jaxlm.data.hub_tokenizer import ImportedTokenizer
from tests.data import tokenizer_kinds

TEXT = "H\u00e9 12  +\n34 = \U0001f600 \u6f22\u5b57!  \n\nx"


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", tokenizer_kinds.KINDS)
def test_a_spelled_control_token_is_text(kind):
    tokenizer = tokenizer_kinds.kind(kind)
    control = ControlTokens(tokenizer)
    spelled = f"a{next(iter(tokenizer.specials))}b {TEXT}"
    (encoded,) = control.encode([(control.guarded(spelled), [])])
    assert encoded.ids.tolist() == tokenizer.encode(spelled)


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", tokenizer_kinds.KINDS)
def test_ids_have_the_weight_of_their_first_character(kind):
    tokenizer = tokenizer_kinds.kind(kind)
    for text in (TEXT, "plain words"):
        for cut in range(1, len(text)):
            ((ids, starts),) = tokenizer.encode_with_starts([text])
            assert ids == tokenizer.encode(text)
            (encoded,) = ControlTokens(tokenizer).encode(
                [(text, [WeightedSpan(cut, len(text), 0.5)])]
            )
            expected = np.where(np.array(starts) >= cut, 0.5, 0)
            np.testing.assert_array_equal(encoded.weights, expected)
            assert encoded.crossed == (cut not in starts and starts[-1] > cut)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "bpe", "gpt2", "characters"])
def test_ids_of_trained_spans_spell_them(kind):
    tokenizer = tokenizer_kinds.kind(kind)
    control = ControlTokens(tokenizer)
    begin, end = "<|bos|>user\n", "<|eos|>"
    text = begin + TEXT + end + TEXT
    (encoded,) = control.encode([(text, [WeightedSpan(len(begin), len(begin + TEXT + end), 1)])])
    trained = encoded.ids[encoded.weights > 0].tolist()
    assert trained == [*tokenizer.encode(TEXT), 2]
    assert encoded.ids[0] == 1


@pytest.mark.parametrize(
    "kind", [k for k in tokenizer_kinds.KINDS if "imported" in k or k == "gguf"]
)
def test_ids_of_an_imported_tokenizer_are_the_librarys(kind):
    tokenizer = tokenizer_kinds.kind(kind)
    assert isinstance(tokenizer, ImportedTokenizer)
    first, *_, last = tokenizer.specials
    text = f"{first}[INST] {TEXT} [/INST] {TEXT}{last}{first} {TEXT}"
    theirs = hf.Tokenizer.from_buffer(tokenizer.content).encode(text, add_special_tokens=False).ids
    assert ControlTokens(tokenizer).encode([(text, [])])[0].ids.tolist() == theirs
