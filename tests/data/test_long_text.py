"""A long text has the ids of encoding it at once, for every tokenizer."""

import random
from pathlib import Path

import numpy as np
import pytest

from jaxlm.data import long_text, tokenizer, writer
from jaxlm.data.config import DataConfig
from jaxlm.data.dataset import open_data
from jaxlm.data.records import Document, LeftOut
from tests.data.test_tokenizer import NASTY
from tests.data.tokenizer_kinds import KINDS, LINES, kind

CODE = "".join(LINES)


def some_text(draw: random.Random) -> str:
    """Return words, runs of one kind of characters, and what normalization joins, shuffled."""

    def word() -> str:
        begin = draw.randrange(len(CODE) - 60)
        return CODE[begin : begin + draw.randrange(60)]

    def run(characters: str, most: int = 90) -> str:
        return "".join(draw.choices(characters, k=draw.randrange(most)))

    makers = [
        *[word] * 12,
        lambda: " " * draw.randrange(40),
        lambda: draw.choice(["\n", "\r\n", "\n\n", "\r\n\r\n\t", " \n ", "\u3000", "\xa0"]),
        lambda: run(" \n\t\r", 30),
        lambda: draw.choice("ab \n-") * draw.randrange(150),
        lambda: run("0123456789"),
        lambda: run("abcdefgh", 200),
        lambda: run("e\u0301\u0323\u0308", 30),
        lambda: run("\u1112\u1161\u11ab\uac00", 30),
        lambda: run("\u6f22\u5b57\u65e5\u672c\u3002\uff0c"),
        lambda: run("\U0001f468\u200d\U0001f469\U0001f600", 30),
        lambda: run("-=.,;:'\"()\u2581\ufb01\u212b\0", 40),
        lambda: draw.choice(["<a>", "  <a> ", " word ", "sword", "'s", "don't", *NASTY]),
    ]
    return "".join(draw.choice(makers)() for _ in range(draw.randrange(60)))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of a hundred characters, so that a short text has many of them."""
    for name, value in dict(CONTEXT=48, SEARCH=40, MAX_WORD_SPAN=400, BATCH=2000).items():
        monkeypatch.setattr(long_text, name, value)
    monkeypatch.setattr(tokenizer, "UNIGRAM_PART", 50)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", KINDS)
def test_ids_of_a_text_in_spans_are_those_of_the_whole_text(
    name: str, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kind(name)
    if made.span == tokenizer.Tokenizer.span:
        monkeypatch.setattr(made, "span", 100)
    draw = random.Random(name)
    texts = [some_text(draw) for _ in range(60)]
    ids = list(long_text.encode(made, texts))
    for text, arrays, whole in zip(texts, ids, made.encode_many(texts), strict=True):
        assert np.concatenate(arrays).tolist() == whole, ascii(text)
    if made.span == 100:
        assert sum(map(len, ids)) > 3 * len(texts)  # they were cut


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "name",
    [name for name in KINDS if name not in ("bytes", "characters", "wordpiece", "bert")],
)
def test_shards_hold_the_ids_of_the_whole_text(name: str, tmp_path: Path) -> None:
    """At the size of a real file: the parts used to begin with a space of their own."""
    made = kind(name)
    text = (CODE + "\n\n" + CODE[::-1])[:60_000]
    stored = writer.write(tmp_path / "s", [Document(text, "a", 0)], made, LeftOut())
    ids = stored.read(0, 0, int(stored.lengths(0, 1)[0])).tolist()
    assert ids == [*made.before, *made.encode(text), *made.after]
    assert stored.manifest.bytes == len(text.encode())


@pytest.mark.parametrize("name", ["sentencepiece with a prefix", "gpt2 with a prefix", "gguf"])
def test_a_prefix_is_known(name: str) -> None:
    assert kind(name).lead == " "
    assert kind(name).decode(kind(name).encode("a b")) == " a b"


def test_where_no_cut_holds_a_text_is_encoded_whole(
    short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of combining characters is an example: normalization sorts over all its length."""
    made = kind("NFC")
    monkeypatch.setattr(made, "span", 100)
    text = "a" + "\u0301\u0323" * 2000
    (ids,) = long_text.encode(made, [text])
    assert len(ids) == 1
    assert ids[0].tolist() == made.encode(text)


def test_tokens_in_the_cache_of_another_way_to_cut_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 500)
    config = DataConfig(
        train=(str(tmp_path / "a.txt"),), validation=(), tokenizer="bytes", sequence=16
    )
    output: list[str] = []
    for version in (writer.ENCODING - 1, writer.ENCODING):
        monkeypatch.setattr(writer, "ENCODING", version)
        open_data(config, seed=0, root=tmp_path / "cache", log=output.append)
    assert sum(line.startswith("tokenizing") for line in output) == 2
