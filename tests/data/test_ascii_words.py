"""The ids of ASCII text by words are those of the tokenizers library."""

import builtins
import inspect
import json
import random
import re

import numpy as np
import pytest
import tokenizers as hf
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxlm.core.errors import DataError
from jaxlm.data import ascii_words
from jaxlm.data.control_tokens import ControlTokens, WeightedSpan
from jaxlm.data.hub_tokenizer import ImportedTokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
POSSESSIVE = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]|\s+(?!\S)|\s+"
)
CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SYMBOLS = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|"
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str):
    return pre_tokenizers.Split(hf.Regex(pattern), "isolated")


CUTS = {
    "gpt2": [],
    "llama3": [split(LLAMA3)],
    "cl100k": [split(POSSESSIVE)],
    "o200k": [split(CASES)],
    "deepseek": [split(r"\p{N}{1,3}"), split("[\u4e00-\u9fa5\u3040-\u309f]+"), split(SYMBOLS)],
    "digits": [pre_tokenizers.Digits(individual_digits=True)],
    "letters only": [split(r"\p{L}+")],
    "others": [split(r"\P{Lu}+|[^\P{L}A-C]")],
}
GPT2_WORDS = ("gpt2", "digits")  # those that ByteLevel cuts too
CONTROL = re.compile(r"<\|begin\|>|<\|end\|>")
WORDS = [inspect.getdoc(each) or "" for each in vars(builtins).values()]


@pytest.fixture(scope="module", params=CUTS)
def library(request):
    """Return a tokenizer trained on Python's documentation."""
    built = hf.Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=request.param in GPT2_WORDS)
    built.pre_tokenizer = pre_tokenizers.Sequence([*CUTS[request.param], last])
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(WORDS, trainer)
    built.add_tokens(["<tool>"])
    return built


@pytest.fixture(scope="module")
def texts():
    """Return documentation, and random ASCII text that is rich in what patterns look for."""
    draw = random.Random(0)
    pieces = [
        *map(chr, range(128)),
        *" \n\r\t'" * 20,
        *"aZ09" * 5,
        "'ll",
        "'VE",
        "  ",
        "\r\n",
        "x" * 60,
    ]
    noise = ["".join(draw.choices(pieces, k=draw.randint(1, 60))) for _ in range(1500)]
    return [text for text in WORDS if text.isascii()] + noise


def imported(library) -> ImportedTokenizer:
    return ImportedTokenizer(library.to_str().encode(), before=[0], after=[1])


@pytest.fixture(autouse=True)
def few_processors(monkeypatch):
    monkeypatch.setattr(ascii_words, "_processors", lambda: 2)


def test_the_ids_of_ascii_text_are_the_librarys(library, texts):
    tokenizer = imported(library)
    words = tokenizer._words
    assert words is not None
    encoded = [np.frombuffer(words.encode(text), np.int32).tolist() for text in texts]
    assert encoded == [each.ids for each in library.encode_batch(texts, add_special_tokens=False)]
    assert tokenizer.encode_many(texts) == encoded  # now from the cache


def test_other_text_has_the_librarys_ids(library):
    tokenizer = imported(library)
    texts = ["caf\u00e9 au lait", "a <tool> b", "plain words", "\u2019s \u6f22"]
    assert [tokenizer._words.encode(text) is None for text in texts] == [True, True, False, True]
    theirs = [each.ids for each in library.encode_batch(texts, add_special_tokens=False)]
    assert tokenizer.encode_many(texts) == theirs


def test_ids_and_weights_of_chat_text_are_the_librarys(library, texts, monkeypatch):
    tokenizer = imported(library)
    control = ControlTokens(tokenizer)
    draw, chats = random.Random(1), []
    for spelt in ["", "<|end|>x"] * 100:  # a text that spells a control token has guards
        parts = [
            f"<|begin|>{control.guarded(text + spelt)}<|end|>" for text in draw.sample(texts, 3)
        ]
        whole = "".join(parts)
        inside = {n for m in CONTROL.finditer(whole) for n in range(m.start() + 1, m.end())}
        places = np.sort(draw.sample(sorted(set(range(len(whole))) - inside), 4))
        spans = [WeightedSpan(a, b, 0.5) for a, b in places.reshape(2, 2).tolist()]
        chats.append((whole, spans))
    monkeypatch.setattr(ascii_words, "_processors", lambda: ascii_words.MOST_PROCESSORS + 1)
    by_library = ControlTokens(tokenizer)
    assert control._words is not None
    assert by_library._words is None
    assert [control._by_words(*chat) is None for chat in chats] == [False, True] * 100
    for one, other in zip(control.encode(chats), by_library.encode(chats), strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.weights, other.weights)
        assert one.crossed == other.crossed


def test_a_failure_of_the_library_at_a_word_of_a_chat_is_an_error_of_the_data(library, monkeypatch):
    control = ControlTokens(imported(library))

    def fail(word):
        raise Exception("a token is out of the vocabulary")

    monkeypatch.setattr(control._words._words, "_function", fail)
    with pytest.raises(DataError, match="out of the vocabulary"):
        control.encode([("<|begin|>words<|end|>", [])])


@pytest.mark.parametrize(
    "pattern",
    ["^a", "a$|b", "(a)", r"\bx", r"x{1,2}+", "[[:alpha:]]", "[a&&b]", "a*", "x{,3}", r"\p{Han}"],
)
def test_a_pattern_that_may_mean_something_else_is_left_to_the_library(pattern):
    assert ascii_words.translated(pattern) is None


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"added_tokens": [{"content": "<t>", "special": True, "lstrip": True}]},
        {"model": {"type": "BPE", "dropout": 0.1}},
        {"model": {"type": "Unigram"}},
        {"normalizer": [[]]},  # the library reads it as an object
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [[], {"type": "ByteLevel"}]}},
        {"added_tokens": [[0, "<t>"]]},
    ],
)
def test_another_form_of_tokenizer_is_left_to_the_library(change):
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    parsed = {"model": {"type": "BPE"}, "pre_tokenizer": byte_level, "added_tokens": []}
    assert ascii_words.AsciiWords.of(parsed, list) is not None
    assert ascii_words.AsciiWords.of(json.loads(json.dumps(parsed | change)), list) is None
