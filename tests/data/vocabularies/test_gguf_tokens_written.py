"""A tokenizer written as a GGUF has it gives the ids it gave, or is refused."""

import itertools
import json
from pathlib import Path

import pytest
import tokenizers

from jaxlm.core.errors import ConfigError
from jaxlm.data import tokenizer_json, train_tokenizer
from jaxlm.data.hub_tokenizer import ImportedTokenizer
from jaxlm.data.vocabularies import byte_pairs, gguf_tokens, pieces
from jaxlm.data.vocabularies.gguf_tokens import PRE_TOKENIZERS
from jaxlm.data.vocabularies.pieces import SPACE
from tests.data.vocabularies.test_gguf_tokens import MERGES, VOCABULARY, of_byte_pairs
from tests.data.vocabularies.test_pieces import TEXTS, model

SOURCE = Path(json.__file__).with_name("decoder.py").read_text()


def read_back(written: dict) -> ImportedTokenizer:
    content, _ = gguf_tokens.as_json(written, "x.gguf")
    return ImportedTokenizer(content, before=[], after=[0])


@pytest.mark.parametrize("kind", ["sentencepiece:512", "bpe:600"])
def test_a_tokenizer_that_was_trained_here_keeps_its_ids(kind):
    ours = train_tokenizer.train(kind, iter([SOURCE] * 3))
    written = gguf_tokens.metadata(tokenizer_json.as_json(ours), ours.size + 3, "here")
    restored = read_back(written)
    texts = [
        text for text in [*TEXTS, SOURCE] if SPACE not in text
    ]  # in any tokenizer.json that is a space
    assert len(texts) > 5
    assert restored.encode_many(texts) == ours.encode_many(texts)
    tokens, kinds = (written[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    assert tokens[:4] == ["<|pad|>", "<|bos|>", "<|eos|>", "<|unk|>"]
    assert tokens[-3:] == [f"[PAD{ours.size + i}]" for i in range(3)]
    # What llama.cpp calls control tokens, one that is unknown, and those that nothing uses.
    assert kinds[:3] == [3, 3, 3]
    assert kinds[3] == (2 if kind.startswith("sentencepiece") else 3)
    assert kinds[-3:] == [5, 5, 5]
    assert 1 not in restored.encode("<|bos|>x")


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_pieces_of_an_imported_model_keep_their_ids(name):
    content = pieces.as_json(pieces.read(model(name), "here"), "here")
    rows = tokenizers.Tokenizer.from_buffer(content).get_vocab_size()
    written = gguf_tokens.metadata(content, rows, "here")
    tokenizer = ImportedTokenizer(content, before=[], after=[0])
    assert read_back(written).encode_many(TEXTS) == tokenizer.encode_many(TEXTS)
    assert written["tokenizer.ggml.add_space_prefix"] == (name == "llama")
    # llama.cpp goes by scores alone: those of pieces fall in the order in which these are merged,
    # none like another.
    scores = dict(
        zip(*(written[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores")), strict=True)
    )
    merged = list(dict.fromkeys(map("".join, json.loads(content)["model"]["merges"])))
    ranks = [scores[piece] for piece in merged]
    assert len(ranks) > 100
    assert all(first > then for first, then in itertools.pairwise(ranks))
    assert max(scores[piece] for piece in scores.keys() - set(merged)) < ranks[-1]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe", "smaug-bpe"])
def test_the_way_to_cut_words_is_recognised(pre):
    content, _ = gguf_tokens.as_json(of_byte_pairs(pre), "here")
    written = gguf_tokens.metadata(content, len(VOCABULARY) + 3, "here")
    assert (
        PRE_TOKENIZERS[written["tokenizer.ggml.pre"]] == PRE_TOKENIZERS[pre] or pre == "llama-bpe"
    )
    assert PRE_TOKENIZERS[written["tokenizer.ggml.pre"]]._replace(begins=False) == PRE_TOKENIZERS[
        pre
    ]._replace(begins=False)
    assert written["tokenizer.ggml.merges"] == [f"{a} {b}" for a, b in MERGES]
    assert written["tokenizer.ggml.token_type"][-3:] == [3, 4, 1]


def unigram() -> bytes:
    return tokenizer_json.as_json(train_tokenizer.train("unigram:512", iter([SOURCE] * 3)))


def words() -> bytes:
    return tokenizer_json.as_json(train_tokenizer.train("wordpiece:512", iter([SOURCE] * 3)))


def single_bytes() -> bytes:
    return tokenizer_json.as_json(train_tokenizer.train("bytes", iter([])))


def cut_at_commas() -> bytes:
    parsed = json.loads(byte_pairs.as_json(VOCABULARY, MERGES, pattern="gpt2", where="here"))
    comma = {"type": "Split", "pattern": {"String": ","}, "behavior": "Isolated", "invert": False}
    parsed["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [comma, parsed["pre_tokenizer"]],
    }
    return json.dumps(parsed).encode()


def lower_case() -> bytes:
    parsed = json.loads(pieces.as_json(pieces.read(model("llama"), "here"), "here"))
    parsed["normalizer"]["normalizers"].insert(0, {"type": "Lowercase"})
    return json.dumps(parsed).encode()


def nothing_is_unknown() -> bytes:
    parsed = json.loads(pieces.as_json(pieces.read(model("llama"), "here"), "here"))
    parsed["model"]["unk_token"] = None
    return json.dumps(parsed).encode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (unigram, "its type is Unigram"),
        (words, "its type is WordPiece"),
        (single_bytes, "no merges"),
        (cut_at_commas, "gives the same ids"),
        (lower_case, "gives the same ids"),
        (nothing_is_unknown, "gives the same ids"),
    ],
)
def test_what_llama_cpp_would_read_otherwise_is_refused(content, why):
    with pytest.raises(ConfigError) as error:
        gguf_tokens.metadata(content(), 1000, "here")
    assert why in error.value.why
    assert error.value.fix.startswith("--to=hf")
