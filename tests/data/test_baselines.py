"""Reference compressors measure the tokenized text."""

import bz2
from pathlib import Path

import numpy as np
import pytest

from jaxlm.data import baselines, tokenizer, writer
from jaxlm.data.records import Document, LeftOut


def test_the_text_comes_back_from_the_tokens_in_order(tmp_path: Path) -> None:
    texts = ["one \u6f22\n", "", "two" * 50]
    encoder = tokenizer.Bytes()
    stored = writer.write(
        tmp_path / "s", [Document(t, "a", n) for n, t in enumerate(texts)], encoder, LeftOut()
    )
    assert baselines.stored_text(stored) == "".join(texts).encode()
    assert baselines.stored_text(stored, limit=5) == "".join(texts).encode()[:5]


def test_random_bytes_need_eight_bits_by_any_method() -> None:
    bits = baselines.bits_per_byte(np.random.default_rng(0).bytes(100_000))
    assert bits.keys() == {"unigram", "gzip -9", "bz2 -9", "xz -9e"}
    assert all(value == pytest.approx(8, abs=0.1) for value in bits.values())


def test_four_equal_letters_have_two_bits_and_bz2_is_its_file_size() -> None:
    text = b"abcd" * 1000
    bits = baselines.bits_per_byte(text)
    assert bits["unigram"] == 2
    assert bits["bz2 -9"] == 8 * len(bz2.compress(text, 9)) / len(text)
    assert baselines.bits_per_byte(b"") == {}
