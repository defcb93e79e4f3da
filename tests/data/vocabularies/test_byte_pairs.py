"""Byte-level byte pairs of tiktoken's ranks give tiktoken's ids; other files are refused."""

import base64
import itertools
import json
import random
from pathlib import Path

import pytest
import tiktoken
import tokenizers

from jaxlm.core.errors import DataError
from jaxlm.data.hub_tokenizer import ExtraToken, ImportedTokenizer, with_extra_tokens
from jaxlm.data.vocabularies import byte_pairs
from jaxlm.data.vocabularies.byte_pairs import REGEX
from tests.data.test_tokenizer import NASTY, _random_texts

BYTES = {bytes([byte]): byte for byte in range(256)}
TEXTS = [*NASTY, *_random_texts()[:50], "x" * 3000, " " * 3000, "don't I'LL 1234567 a\u0301"]


def trained(text: str, count: int) -> dict[bytes, int]:
    """Ranks of the most common pairs, merged one after another: byte pairs as first described."""
    words = [[bytes([byte]) for byte in word.encode()] for word in text.split(" ")]
    ranks = dict(BYTES)
    for _ in range(count):
        pairs: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                pairs[pair] = pairs.get(pair, 0) + 1
        a, b = max(sorted(pairs), key=lambda pair: pairs[pair])
        ranks[a + b] = len(ranks)
        for word in words:
            for at in reversed(range(len(word) - 1)):
                if word[at : at + 2] == [a, b]:
                    word[at : at + 2] = [a + b]
    return ranks


def made(ranks: dict[bytes, int], pattern="cl100k") -> bytes:
    vocabulary, merges = byte_pairs.from_ranks(ranks)
    return byte_pairs.as_json(vocabulary, merges, pattern=pattern, where="x", whole_words=True)


@pytest.mark.parametrize("pattern", REGEX)
def test_ids_are_those_of_tiktoken(pattern):
    source = Path(json.__file__).read_text()
    ranks = trained(source[:3000], 200)
    theirs = tiktoken.Encoding(
        "x", pat_str=REGEX[pattern], mergeable_ranks=ranks, special_tokens={"<|end|>": len(ranks)}
    )
    content = with_extra_tokens(
        made(ranks, pattern), [ExtraToken("<|end|>", len(ranks), True)], "x"
    )
    ours = ImportedTokenizer(content, before=[], after=[len(ranks)])
    texts = [*TEXTS, source]
    for text, ids in zip(texts, ours.encode_many(texts), strict=True):
        assert ids == theirs.encode_ordinary(text), ascii(text[:60])
        assert ours.decode(ids) == text
    assert ours.size == theirs.n_vocab
    assert len(ours.encode(source)) < 0.8 * len(source)


def drawn(draw: random.Random) -> dict[bytes, int]:
    """Ranks over one to three letters, in an order that no training need have made."""
    letters = [b"a", b"b", b"c"][: draw.randint(1, 3)]
    tokens, ranks = list(letters), dict(BYTES)
    for _ in range(draw.choice([5, 20, 60])):
        token = draw.choice(tokens) + draw.choice(tokens)
        if draw.random() < 0.5:
            token = b"".join(draw.choices(letters, k=draw.randint(2, 7)))
        if len(token) < 12 and token not in ranks:
            ranks[token] = len(ranks)
            tokens.append(token)
    return ranks


def test_ranks_in_any_order_give_the_ids_of_tiktoken():
    draw = random.Random(0)
    compared = 0
    for _ in range(60):
        ranks = drawn(draw)
        theirs = tiktoken.Encoding(
            "x", pat_str=REGEX["cl100k"], mergeable_ranks=ranks, special_tokens={}
        )
        ours = tokenizers.Tokenizer.from_buffer(made(ranks))
        for _ in range(20):
            text = "".join(draw.choices("abc", k=draw.randint(1, 60)))
            assert ours.encode(text).ids == theirs.encode_ordinary(text), (text, ranks)
            compared += len(text) > 9
    assert compared > 500


def lines(ranks: dict[bytes, int]) -> bytes:
    return b"".join(b"%s %d\n" % (base64.b64encode(t), r) for t, r in ranks.items())


def test_a_file_of_ranks_is_read_as_it_was_written():
    ranks = trained("low lower lowest low low", 4)
    assert byte_pairs.parse_ranks(lines(ranks), "x") == ranks


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lines(BYTES) + b"!!! 256\n", "line 257"),
        (lines(BYTES) + b"YWI=\n", "line 257"),
        (lines(BYTES) + b"YWI= -3\n", "line 257"),
        (lines(BYTES) + b"YWI= 99999999999\n", "line 257"),
        (lines(BYTES) + b"QQ== 256\n", "line 257"),
        (lines(BYTES) + b"YWI= 7\n", "same rank"),
        (lines({b"a": 0}), "lacks tokens for some bytes"),
        (lines(BYTES) + base64.b64encode(b"a" * 10_000_000) + b" 256\n", "10,000,000 bytes"),
        (b"\0" * 1_000_000, "line 1"),
        (lines({b"%0999d" % n: n for n in range(9000)}), "8,991,000 bytes in all"),
    ],
)
def test_a_file_that_holds_no_ranks_is_refused_where_it_goes_wrong(content, message):
    with pytest.raises(DataError) as caught:
        byte_pairs.parse_ranks(content, "x")
    assert message in f"{caught.value.what} {caught.value.where} {caught.value.why}"


def test_a_token_that_would_get_another_id_is_refused():
    with pytest.raises(DataError, match="another id") as caught:
        with_extra_tokens(made(BYTES), [ExtraToken("<|end|>", 300, True)], "x")
    assert "'<|end|>' has id 300, and would get 256" in caught.value.why


def test_a_merge_that_is_not_two_tokens_is_refused():
    assert byte_pairs.parse_merges(["a b", "ab c"], "x") == [("a", "b"), ("ab", "c")]
    with pytest.raises(DataError, match="does not have two tokens"):
        byte_pairs.parse_merges(["a b", "abc"], "x")
    with pytest.raises(DataError, match="not a valid tokenizer"):
        byte_pairs.as_json({"a": 0}, [("a", "b")], pattern="gpt2", where="x")
