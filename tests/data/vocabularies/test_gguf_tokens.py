"""The tokenizer in a GGUF gives the ids that the model's own gives."""

import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from jaxlm.core.errors import DataError
from jaxlm.data.hub_tokenizer import ImportedTokenizer
from jaxlm.data.vocabularies import byte_pairs, gguf_tokens, pieces
from jaxlm.data.vocabularies.byte_pairs import build_pre_tokenizer
from jaxlm.data.vocabularies.gguf_tokens import PRE_TOKENIZERS
from tests.data.vocabularies.test_byte_pairs import trained
from tests.data.vocabularies.test_pieces import TEXTS, model


def of_sentencepiece(name: str, **changes) -> dict:
    """Metadata that llama.cpp's conversion writes for a SentencePiece model."""
    vocabulary = pieces.read(model(name), "here")
    values = {
        "model": "llama",
        "tokens": [piece.text for piece in vocabulary.pieces],
        "scores": [piece.score for piece in vocabulary.pieces],
        "token_type": [int(piece.kind) for piece in vocabulary.pieces],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": vocabulary.prefixed,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items()}


RANKS = trained(Path(json.__file__).read_text()[:3000], 150)
VOCABULARY, MERGES = byte_pairs.from_ranks(RANKS)


def of_byte_pairs(pre: str, **changes) -> dict:
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*VOCABULARY, "<|end|>", "<|user|>", "[PAD9]"],
        "token_type": [*[1] * len(VOCABULARY), 3, 4, 5],
        "merges": [f"{a} {b}" for a, b in MERGES],
        "eos_token_id": len(VOCABULARY),
        "bos_token_id": len(VOCABULARY),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items()}


def imported(metadata: dict) -> ImportedTokenizer:
    content, settings = gguf_tokens.as_json(metadata, "x.gguf")
    number = tokenizers.Tokenizer.from_buffer(content).token_to_id(settings["eos_token"])
    return ImportedTokenizer(content, before=[], after=[number])


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_pieces_give_the_ids_of_sentencepiece(name):
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model(name))
    ours = imported(of_sentencepiece(name))
    for text, ids in zip(TEXTS, ours.encode_many(TEXTS), strict=True):
        assert ids == theirs.encode(text), ascii(text[:60])


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_byte_pairs_give_the_ids_of_the_tokenizer_that_they_were(pre):
    cut = PRE_TOKENIZERS[pre]
    whole = tokenizers.Tokenizer(
        tokenizers.models.BPE(VOCABULARY, MERGES, ignore_merges=cut.whole_words)
    )
    if cut.composed:
        whole.normalizer = tokenizers.normalizers.NFC()
    whole.pre_tokenizer = build_pre_tokenizer(cut.pattern)
    ours = imported(of_byte_pairs(pre))
    for text, ids in zip(TEXTS, ours.encode_many(TEXTS), strict=True):
        assert ids == whole.encode(text).ids
        if pre != "qwen2":
            assert ours.decode(ids) == text
    assert ours.specials == {"<|end|>": len(VOCABULARY)}
    assert ours.encode("a<|user|>b<|end|>")[1] == len(VOCABULARY) + 1


@pytest.mark.parametrize(
    ("metadata", "begins"),
    [
        (of_sentencepiece("llama"), True),
        (of_sentencepiece("llama", add_bos_token=False), False),
        (of_byte_pairs("gpt-2"), False),
        (of_byte_pairs("llama-bpe"), True),
        (of_byte_pairs("qwen2", add_bos_token=True), True),
    ],
)
def test_a_document_begins_as_in_the_file_or_by_the_default_of_llama_cpp(metadata, begins):
    _, settings = gguf_tokens.as_json(metadata, "x.gguf")
    assert settings["add_bos_token"] is begins


def test_the_chat_template_is_kept():
    template = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.chat_template.tools": "x"}
    _, settings = gguf_tokens.as_json(of_byte_pairs("gpt-2") | template, "x.gguf")
    assert settings["chat_template"] == "{{ messages }}"
    assert settings["eos_token"] == "<|end|>"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "its tokens is not a list of str"),
        (of_byte_pairs("gpt-2", model="rwkv"), "its model is 'rwkv'"),
        (of_byte_pairs("gpt-2", model=[1]), "its model is [1]"),
        (of_byte_pairs("tekken"), "tokenizer.ggml.pre is 'tekken'"),
        (of_byte_pairs("gpt-2", tokens=["a", "a"], token_type=[1, 1]), "two of its tokens"),
        (of_byte_pairs("gpt-2", token_type=[1]), "token_type does not have a valid type"),
        (of_byte_pairs("gpt-2", token_type=[77] * (len(VOCABULARY) + 3)), "token_type does not"),
        (of_byte_pairs("gpt-2", merges=["a"]), ""),
        (of_byte_pairs("gpt-2", merges=["\u4e00 \u4e01"]), ""),
        (of_sentencepiece("llama", scores=[1.0]), "1 scores of"),
        (of_sentencepiece("llama", tokens=[["a"]] * 700), "not a list of str"),
        (of_byte_pairs("gpt-2", clever=1), "'tokenizer.ggml.clever' is unknown"),
    ],
)
def test_a_tokenizer_that_is_not_understood_is_refused(metadata, message):
    with pytest.raises(DataError) as caught:
        gguf_tokens.as_json(metadata, "x.gguf")
    assert message in caught.value.why
