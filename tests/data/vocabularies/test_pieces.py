"""A SentencePiece model as a tokenizer.json gives the ids that SentencePiece itself gives."""

import ast
import functools
import io
import json
import random
import tokenize
from pathlib import Path

import pytest
import sentencepiece

from jaxlm.core.errors import DataError
from jaxlm.data.hub_tokenizer import ImportedTokenizer
from jaxlm.data.vocabularies import pieces
from tests.data.test_tokenizer import NASTY, _random_texts

LINES = [
    *Path(tokenize.__file__).read_text().splitlines(),
    *Path(json.__file__).read_text().splitlines(),
    *[
        "\u65e5\u672c\u8a9e \u306e \u30c6\u30ad\u30b9\u30c8 caf\u00e9 \ufb01 \u212b "
        "\u05e9\u05dc\u05d5\u05dd"
    ]
    * 5,
]
AS_IS = dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
USER = ["<mask>", "\n\n", "\n", "<unused0>"]
MODELS = {
    "llama": AS_IS
    | dict(model_type="bpe", byte_fallback=True, unk_id=0, bos_id=1, eos_id=2, pad_id=-1),
    "gemma": AS_IS
    | dict(
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        user_defined_symbols=USER,
    ),
    "t5": dict(model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1),
    "unigram of bytes": AS_IS
    | dict(model_type="unigram", byte_fallback=True, required_chars="</>"),
}
TEXTS = [
    *NASTY,
    *_random_texts()[:100],
    " a",
    "   ",
    "x\t y  ",
    "a<mask>b <mask> c\n\n\nd",
    "\u202eabc \u0645\u0631\u062d\u0628\u0627 \u202c",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 12345 \ufb01 \u212b \u00bd",
    "a" * 5000,
    " " * 5000,
    b"\xff\xfe broken \xe6\xbc".decode("utf-8", "replace"),
    Path(ast.__file__).read_text(),
]


@functools.cache
def model(name: str) -> bytes:
    """A SentencePiece model of some Python and a few other scripts."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in LINES if line]),
        model_writer=made,
        vocab_size=700,
        hard_vocab_limit=False,
        minloglevel=2,
        **MODELS[name],
    )
    return made.getvalue()


@functools.cache
def imported(name: str) -> ImportedTokenizer:
    vocabulary = pieces.read(model(name), "here")
    before = [] if vocabulary.begins is None else [1]
    return ImportedTokenizer(pieces.as_json(vocabulary, "here"), before=before, after=[1])


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_sentencepiece(name):
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model(name))
    ours = imported(name)
    assert pieces.differences(model(name), ours.content) == []
    for text, ids in zip(TEXTS, ours.encode_many(TEXTS), strict=True):
        assert ids == theirs.encode(text), ascii(text[:80])
    assert ours.size == theirs.vocab_size()
    assert ours.unk == theirs.unk_id()


@pytest.mark.parametrize("name", ["llama", "gemma", "unigram of bytes"])
def test_text_comes_back_behind_the_space_that_was_put_before_it(name):
    ours = imported(name)
    lead = " " if pieces.read(model(name), "here").prefixed else ""
    for text in TEXTS:
        if text and "\u2581" not in text:
            assert ours.decode(ours.encode(text)) == lead + text


def test_an_other_tokenizer_shows_in_the_comparison():
    other = pieces.as_json(pieces.read(model("gemma"), "here"), "here")
    assert len(pieces.differences(model("llama"), other)) == len(pieces.PROBES)


def changed(**fields) -> bytes:
    """A model in whose proto these fields were set: name__field for one of a part."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model("llama"))
    for name, value in fields.items():
        part, _, field = name.partition("__")
        setattr(getattr(proto, part), field, value)
    return proto.SerializeToString()


def with_piece(**fields) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model("llama"))
    for field, value in fields.items():
        setattr(proto.pieces[300], field, value)
    return proto.SerializeToString()


def test_pieces_too_long_to_look_through_are_refused():
    many = tuple(
        pieces.VocabularyPiece(f"{n:0999}", 0.0, pieces.PieceKind.NORMAL) for n in range(9000)
    )
    unknown = pieces.VocabularyPiece("<unk>", 0.0, pieces.PieceKind.UNKNOWN)
    vocabulary = pieces.PieceVocabulary(
        pieces=(unknown, *many), algorithm="bpe", prefixed=True, squeezed=False
    )
    with pytest.raises(DataError) as caught:
        pieces.checked(vocabulary, "x")
    assert "8,991,005 characters in all" in caught.value.why


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: b"junk" * 100, "not a SentencePiece model"),
        (lambda: model("llama")[:-10], "not a SentencePiece model"),
        (lambda: b"", "no unknown piece"),
        (lambda: changed(trainer_spec__model_type=3), "not BPE or unigram"),
        (lambda: changed(trainer_spec__treat_whitespace_as_suffix=True), "an unsupported way"),
        (lambda: changed(normalizer_spec__escape_whitespaces=False), "an unsupported way"),
        (lambda: with_piece(piece="a" * 100_000), "100,000 characters"),
        (lambda: with_piece(piece="<s>"), "two of its pieces are the same"),
        (lambda: changed(normalizer_spec__precompiled_charsmap=b"\xff" * 64), ""),
    ],
)
def test_a_model_that_json_cannot_express_is_refused(content, message):
    with pytest.raises(DataError) as caught:
        pieces.as_json(pieces.read(content(), "x.model"), "x.model")
    assert message in caught.value.why
    assert caught.value.where == "x.model"


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_model_with_changed_bytes_is_read_or_refused_and_nothing_else(name):
    whole, draw = model(name), random.Random(0)
    outcomes = {True: 0, False: 0}
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.choice(
                [0, 1, 10, 255, draw.randrange(256)]
            )
        try:
            pieces.differences(
                bytes(content), pieces.as_json(pieces.read(bytes(content), "x"), "x")
            )
            outcomes[True] += 1
        except DataError:
            outcomes[False] += 1
    assert min(outcomes.values()) > 5, outcomes
