"""Every tokenizer gives text back exactly, and never makes a special token of it."""

import json

import numpy as np
import pytest
import tokenizers as hf

from jaxlm.core.errors import ConfigError, DataError, InputMissing
from jaxlm.data import hub_tokenizer, tokenizer, tokenizer_file, train_tokenizer

NASTY = [
    "",
    " ",
    "  a  b ",
    " " * 300,
    "\n\n\t\tx\r\n\r",
    "\u2581 a \u2581\u2581b\u2581",
    "\u2585\u2584",
    "a\0b\0",
    "\0",
    "\ufeffbom \u200b\u200d",
    "e\u0301 \u212b \ufb01 \u00a0\u3000 \u2028\u2029\x85",
    "\u6f22\u5b57 \U0001f600 \U0010ffff \ud7ff\ue000",
    "<|bos|><|eos|><|pad|><|mask|><|sentinel_0|> <s></s><unk><pad> <0x41>",
    "\x1b[31m\x7f\x01",
    "<|endoftext|>",
]
CORPUS = [
    "def f(x):\n    return x + 1\n\n" * 20,
    "the quick brown fox jumps\tover 12345 dogs\n" * 20,
    "".join(map(chr, range(33, 200))),
]


def _random_texts() -> list[str]:
    rng = np.random.default_rng(0)
    points = np.r_[0:0x500, 0x2500:0x2600, 0x3000:0x3100, 0xF000:0x10200]
    return ["".join(map(chr, rng.choice(points, 40))) for _ in range(200)]


@pytest.fixture(scope="module")
def byte_level() -> tokenizer.Tokenizer:
    made = hf.Tokenizer(hf.models.BPE())
    made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return hub_tokenizer.HuggingFace(made.to_str().encode())


@pytest.fixture(scope="module")
def trained() -> tokenizer.Tokenizer:
    return train_tokenizer.train("sentencepiece:600", iter(CORPUS))


@pytest.fixture(params=["bytes", "characters", "sentencepiece", "hugging face"])
def any_tokenizer(
    request: pytest.FixtureRequest, trained: tokenizer.Tokenizer, byte_level: tokenizer.Tokenizer
) -> tokenizer.Tokenizer:
    if request.param == "characters":
        return train_tokenizer.train("characters", iter([*NASTY, *_random_texts()]))
    return {"bytes": tokenizer.Bytes(), "sentencepiece": trained, "hugging face": byte_level}[
        request.param
    ]


def test_any_text_comes_back_exactly_and_its_bytes_are_counted(
    any_tokenizer: tokenizer.Tokenizer,
) -> None:
    texts = [*NASTY, *_random_texts()]
    for text, ids in zip(texts, any_tokenizer.encode_many(texts), strict=True):
        assert any_tokenizer.decode(ids) == text
        assert any_tokenizer.token_bytes[ids].sum() == len(text.encode()) if ids else text == ""


def test_text_that_spells_a_special_token_is_text(any_tokenizer: tokenizer.Tokenizer) -> None:
    for ids in any_tokenizer.encode_many(NASTY):
        assert all(len(tokenizer.SPECIALS) <= i < any_tokenizer.size for i in ids)


def test_special_tokens_come_first_and_stand_for_no_bytes(
    any_tokenizer: tokenizer.Tokenizer,
) -> None:
    assert not any_tokenizer.token_bytes[: len(tokenizer.SPECIALS)].any()
    assert any_tokenizer.token_bytes.shape == (any_tokenizer.size,)
    assert [any_tokenizer.specials[f"<|{name}|>"] for name in ("pad", "bos", "eos")] == [
        any_tokenizer.pad,
        any_tokenizer.before[0],
        any_tokenizer.eos,
    ]


def test_a_saved_tokenizer_is_the_same_one(any_tokenizer: tokenizer.Tokenizer) -> None:
    loaded = tokenizer_file.load(any_tokenizer.serialize(), "here")
    assert loaded.digest == any_tokenizer.digest
    assert loaded.encode_many(NASTY) == any_tokenizer.encode_many(NASTY)


def test_the_size_of_the_setting_counts_special_tokens_and_bytes(
    trained: tokenizer.Tokenizer,
) -> None:
    assert trained.size == 600


def test_training_twice_on_the_same_text_gives_the_same_tokenizer(
    trained: tokenizer.Tokenizer,
) -> None:
    assert train_tokenizer.train("sentencepiece:600", iter(CORPUS)).digest == trained.digest
    assert (
        train_tokenizer.train(
            "sentencepiece:600", iter([*CORPUS, "while other: words()\n" * 50])
        ).digest
        != trained.digest
    )


def test_a_character_that_training_did_not_see_is_unknown() -> None:
    made = train_tokenizer.train("characters", iter(["abc"]))
    assert made.encode("abz") == [len(tokenizer.SPECIALS), len(tokenizer.SPECIALS) + 1, made.unk]


def test_a_character_cut_in_the_middle_decodes_to_a_replacement(
    any_tokenizer: tokenizer.Tokenizer,
) -> None:
    assert tokenizer.Bytes().decode(tokenizer.Bytes().encode("\u6f22")[:2]) == "\ufffd"
    assert any_tokenizer.decode([any_tokenizer.before[0], any_tokenizer.eos]) == ""


def test_a_vocabulary_too_large_for_the_text_is_refused_with_the_setting() -> None:
    with pytest.raises(ConfigError, match="vocabulary of 9000") as caught:
        train_tokenizer.train("sentencepiece:9000", iter(["too little text"]))
    assert caught.value.where == "data.tokenizer"
    assert caught.value.fix == "--config.data.tokenizer=bytes"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (9000, "\n".join(f"word{n} other{n * n}" for n in range(900))),
        (600, "".join(map(chr, range(0x4E00, 0x5200)))),
    ],
)
def test_the_size_that_the_error_proposes_can_be_trained(size: int, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train_tokenizer.train(f"sentencepiece:{size}", iter([text]))
    proposed = caught.value.fix.removeprefix("--config.data.tokenizer=")
    if proposed != "bytes":
        assert train_tokenizer.train(proposed, iter([text * 2])).size == int(
            proposed.partition(":")[2]
        )


@pytest.mark.parametrize(
    "content", [b"not a model", b"{broken", b'{"model": {"type": "none"}}', b"\x80\x04\x95pickle"]
)
def test_a_file_that_is_no_tokenizer_is_refused(content: bytes) -> None:
    with pytest.raises(DataError):
        tokenizer_file.load(content, "x.model")


def test_a_tokenizer_file_that_is_not_there_is_named() -> None:
    with pytest.raises(InputMissing, match=r"nowhere\.model"):
        tokenizer_file.read("nowhere.model")


def test_a_tokenizer_json_without_byte_pieces_keeps_its_ids(
    byte_level: tokenizer.Tokenizer,
) -> None:
    model = json.loads(byte_level.serialize())
    assert byte_level.size == len(tokenizer.SPECIALS) + len(model["model"]["vocab"])
