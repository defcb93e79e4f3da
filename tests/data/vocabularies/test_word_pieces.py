"""BERT's word pieces: longest first, unknown words whole, and no special tokens from text."""

import pytest

from jaxlm.core.errors import DataError
from jaxlm.data.hub_tokenizer import ImportedTokenizer
from jaxlm.data.vocabularies import word_pieces

PIECES = """[PAD] [UNK] [CLS] [SEP] [MASK] un ##aff ##able ##a want ##ed runn ##ing , . ! the
c ##afe cafe \u6f22 \u5b57 [ ] mask e A""".split()
VOCABULARY = {piece: number for number, piece in enumerate(PIECES)}


def made(**settings) -> ImportedTokenizer:
    content = word_pieces.as_json(VOCABULARY, "vocab.txt", **settings)
    return ImportedTokenizer(content, before=[2], after=[3])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unaffable", "un ##aff ##able"),
        ("UNWANTED running!", "[UNK] runn ##ing !"),  # no piece continues "want"
        ("caf\u00e9 \u6f22\u5b57", "cafe \u6f22 \u5b57"),
        ("[MASK]", "[ mask ]"),
        ("the\0 the\ufffd the\u200b", "the the the"),
        ("x" * 101, "[UNK]"),
        ("", ""),
    ],
)
def test_words_are_cut_into_the_longest_pieces(text, expected):
    ours = made()
    assert ours.encode(text) == [VOCABULARY[piece] for piece in expected.split()]
    assert ours.unk == 1
    assert (ours.before, ours.after) == ((2,), (3,))


def test_settings_of_case_accents_and_chinese_are_kept():
    assert made(lowercase=False).encode("A THE the") == [VOCABULARY["A"], 1, VOCABULARY["the"]]
    assert made(accents=False).encode("caf\u00e9") == [1]
    assert made(apart=False).encode("\u6f22\u5b57") == [1]


def test_decoded_pieces_of_a_word_are_joined_and_words_are_apart():
    ours = made()
    assert ours.decode(ours.encode("Unaffable, the cafe")) == " unaffable , the cafe"


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a\nb\n[UNK]\n"])
def test_a_file_that_holds_no_pieces_of_bert_is_refused(content):
    with pytest.raises(DataError):
        word_pieces.as_json(word_pieces.vocabulary_of(content, "vocab.txt"), "vocab.txt")
