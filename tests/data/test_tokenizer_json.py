"""A tokenizer.json made of one of ours gives the same ids, and the same text back."""

import json
from pathlib import Path

import pytest
import tokenizers

from jaxlm.data import tokenizer_json, train_tokenizer
from jaxlm.data.hub_tokenizer import HuggingFace, ImportedTokenizer
from jaxlm.data.tokenizer import Bytes
from tests.data.test_tokenizer import NASTY

TEXT = [
    json.__doc__ or "",
    Path(json.__file__).read_text(),
    "def f(x):\n\n\n        return x  # \t tabs \r\n",
]


@pytest.fixture(scope="module", params=["bytes", "characters", "sentencepiece:600"])
def tokenizer(request):
    return train_tokenizer.train(request.param, iter(TEXT * 20))


def test_ids_and_text_are_the_same(tokenizer):
    content = tokenizer_json.as_json(tokenizer)
    assert content is not None
    other = tokenizers.Tokenizer.from_str(content.decode())
    other.encode_special_tokens = True
    for text in (*TEXT, *NASTY):
        if "\u2581" in text:
            continue
        ids = tokenizer.encode(text)
        assert other.encode(text, add_special_tokens=False).ids == ids
        assert other.encode(text).ids == [*tokenizer.before, *ids], "a prompt begins as a document"
        if tokenizer.unk not in ids:  # whose name would be written out
            assert other.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids)


def test_an_imported_one_reads_it_with_the_same_tokens_around_a_document(tokenizer):
    named = tokenizer_json.settings(tokenizer)
    imported = ImportedTokenizer(
        tokenizer_json.as_json(tokenizer),
        before=[tokenizer.specials[named["bos_token"]]],
        after=[tokenizer.specials[named["eos_token"]]],
    )
    assert (imported.before, imported.after, imported.size) == (
        tokenizer.before,
        tokenizer.after,
        tokenizer.size,
    )
    assert imported.table == tokenizer.table
    assert imported.encode_many(TEXT) == tokenizer.encode_many(TEXT)


def test_one_whose_ids_were_moved_has_none():
    content = tokenizer_json.as_json(Bytes())
    assert tokenizer_json.as_json(HuggingFace(content)) is None
