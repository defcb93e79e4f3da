"""Trained tokenizers of every kind return text as they promise, and export the same ids."""

import functools
import json
from pathlib import Path

import pytest
import tokenizers

from jaxlm.core.errors import ConfigError, DataError
from jaxlm.data import tokenizer as kinds
from jaxlm.data import tokenizer_file, tokenizer_json, train_tokenizer
from jaxlm.data.hub_tokenizer import HuggingFace, TrainedTokenizer
from jaxlm.data.tokenizer import SPECIALS, StreamDecoder
from tests.data.test_tokenizer import NASTY, _random_texts
from tests.data.vocabularies.test_byte_pairs import BYTES, made

TEXT = [Path(json.__file__).read_text(), Path(json.__file__).with_name("decoder.py").read_text()]
SIZED = ["unigram:600", "bpe:600", "wordpiece:600"]


@functools.cache
def trained(spec: str) -> kinds.Tokenizer:
    return train_tokenizer.train(spec, iter(TEXT))


@pytest.mark.parametrize("spec", SIZED)
def test_a_trained_tokenizer_has_the_size_and_the_special_tokens_of_all(spec):
    tokenizer = trained(spec)
    assert tokenizer.size == 600
    assert not tokenizer.token_bytes[: len(SPECIALS)].any()
    assert (tokenizer.pad, tokenizer.before, tokenizer.after, tokenizer.unk) == (0, (1,), (2,), 3)
    for text in [*NASTY, *TEXT]:
        ids = tokenizer.encode(text)
        assert all(len(SPECIALS) <= i < 600 or i == tokenizer.unk for i in ids)
    loaded = tokenizer_file.load(tokenizer.serialize(), "here")
    assert (loaded.digest, loaded.encode_many(NASTY)) == (
        tokenizer.digest,
        tokenizer.encode_many(NASTY),
    )


@pytest.mark.parametrize("spec", ["unigram:600", "bpe:600"])
def test_any_text_comes_back_exactly(spec):
    tokenizer = trained(spec)
    texts = [*NASTY, *_random_texts(), *TEXT]
    for text, ids in zip(texts, tokenizer.encode_many(texts), strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk not in ids


def test_word_pieces_lose_spaces_alone_and_do_not_know_other_letters():
    tokenizer = trained("wordpiece:600")
    line = "def decode(self, s): return obj"
    spaced = tokenizer.decode(tokenizer.encode(line)).removeprefix(tokenizer.lead)
    assert spaced.replace(" ", "") == line.replace(" ", "")
    assert tokenizer.encode("\u6f22") == [tokenizer.unk]


@pytest.mark.parametrize("spec", SIZED)
def test_training_twice_gives_the_same_and_other_text_another(spec):
    repeated = train_tokenizer.train(spec, iter(TEXT))
    assert repeated.digest == trained(spec).digest
    assert train_tokenizer.train(spec, iter(TEXT[::-1][:1])).digest != repeated.digest


@pytest.mark.parametrize("spec", SIZED)
def test_a_tokenizer_json_of_it_gives_the_same_ids(spec):
    other = tokenizers.Tokenizer.from_buffer(tokenizer_json.as_json(trained(spec)))
    other.encode_special_tokens = True
    for text in [*NASTY, *_random_texts(), *TEXT]:
        if "\u2581" in text:
            continue
        theirs, ours = other.encode(text, add_special_tokens=False).ids, trained(spec).encode(text)
        if spec == "unigram:600" and " " * 30 in text:  # the same pieces, one of them elsewhere
            theirs, ours = sorted(theirs), sorted(ours)
        assert theirs == ours


@pytest.mark.parametrize("spec", ["bpe:5000", "wordpiece:5000", "unigram:5000"])
def test_a_vocabulary_too_large_for_the_text_is_refused_with_one_that_fits(spec):
    with pytest.raises(ConfigError, match="vocabulary of 5000") as caught:
        train_tokenizer.train(spec, iter(TEXT[:1]))
    proposed = caught.value.fix.removeprefix("--config.data.tokenizer=")
    name, _, size = proposed.partition(":")
    assert name == spec.partition(":")[0]
    assert train_tokenizer.train(proposed, iter(TEXT[:1])).size == int(size)


@pytest.mark.parametrize(
    "content", [made(BYTES), b"{}", b"\xff", json.dumps({"model": 1}).encode()]
)
def test_a_file_that_claims_to_be_trained_by_jaxlm_and_is_not_is_refused(content):
    with pytest.raises(DataError):
        TrainedTokenizer(content)
    forged = {"kind": "trained", "content": content.decode(errors="replace")}
    with pytest.raises(DataError):
        tokenizer_file.load(json.dumps(forged).encode(), "here")
    with pytest.raises(DataError):
        tokenizer_file.load(b'{"kind": "trained"}', "here")


@pytest.mark.parametrize("spec", ["bpe:600", "wordpiece:600", "unigram:600"])
def test_a_tokenizer_whose_ids_were_moved_goes_out_with_the_moved_ids(spec):
    inner = trained(spec)
    # As a foreign file it has special tokens of its own, which become ordinary tokens after ours.
    content = tokenizer_json.as_json(inner).replace(b"<|", b"<!")
    moved = HuggingFace(content)
    other = tokenizers.Tokenizer.from_buffer(tokenizer_json.as_json(moved))
    other.encode_special_tokens = True
    assert other.get_vocab_size() == moved.size == 640
    for text in [*NASTY, *TEXT]:
        assert other.encode(text, add_special_tokens=False).ids == moved.encode(text)
    assert other.token_to_id("<|eos|>") == moved.eos


def test_a_moved_tokenizer_with_tokens_of_our_names_is_not_written():
    assert tokenizer_json.as_json(HuggingFace(tokenizer_json.as_json(trained("bpe:600")))) is None


@pytest.mark.parametrize("spec", [*SIZED, "bytes", "sentencepiece:600"])
def test_a_stream_never_splits_a_character_and_loses_none(spec):
    tokenizer = trained(spec)
    for text in [
        "\u6f22\U0001f600e\u0301\u05e9 abc \U0001f468\u200d\U0001f469",
        *NASTY,
        TEXT[0][:500],
    ]:
        ids = tokenizer.encode(text)
        stream = StreamDecoder(tokenizer)
        parts = [stream.push([number]) for number in ids]
        assert "".join(parts) + stream.end() == tokenizer.decode(ids)
        if spec != "wordpiece:600" and "\ufffd" not in text:
            assert not any("\ufffd" in part for part in parts)


def test_a_stream_replaces_what_can_be_no_character():
    tokenizer = kinds.Bytes()
    ids = [len(SPECIALS) + byte for byte in b"a\xff\xe6\xbc!\xe6"]
    stream = StreamDecoder(tokenizer)
    assert [stream.push([number]) for number in ids] == ["a", "\ufffd", "", "", "\ufffd!", ""]
    assert stream.end() == "\ufffd"
