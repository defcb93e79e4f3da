"""A format of `data.formats` is read by training and by cleaning."""

import bz2
import gzip
import io
import json
import lzma
from collections import Counter

import pytest
import zstandard

from jaxlm.corpus.config import Recipe
from jaxlm.corpus.readers.files import read as read_for_cleaning
from jaxlm.data import formats
from jaxlm.data.formats import FORMATS, Format, ReadOptions, Record
from jaxlm.data.records import read as read_for_training

TEXTS = ["first", "second \u00e9", "third\nline"]
ROWS = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)
PACKED = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


def both(path):
    """The texts that training reads, and those that cleaning reads."""
    trained = read_for_training(path, path.name, "text", Counter())
    cleaned = read_for_cleaning(path, path.name, Recipe(), Counter())
    return [each.text for each in trained], [each.text for each in cleaned]


@pytest.mark.parametrize("kind", [".jsonl", ".ndjson", ".json"])
@pytest.mark.parametrize("packing", PACKED)
def test_lines_of_json_are_read_by_both_whatever_packs_them(tmp_path, kind, packing):
    path = tmp_path / f"a{kind}{packing}"
    path.write_bytes(PACKED[packing](ROWS))
    assert both(path) == (TEXTS, TEXTS)


def test_a_new_format_is_written_once(tmp_path, monkeypatch):
    def numbered(stream, options):
        for number, line in enumerate(stream, options.before + 1):
            yield Record(number, {"text": line.decode().rstrip("\n"), "id": number}, share=1.0)

    monkeypatch.setitem(FORMATS, ".numbered", Format(numbered, is_lines=False))
    path = tmp_path / "a.numbered"
    path.write_bytes(b"one\ntwo\n")
    assert both(path) == (["one", "two"], ["one", "two"])


def test_a_line_over_the_limit_is_a_fault_and_the_next_are_read():
    stream = io.BytesIO(b'{"text": "' + b"x" * 99 + b'"}\n' + ROWS)
    records = list(formats.json_lines(stream, ReadOptions("a.jsonl", max_line=50)))
    assert [record.number for record in records] == [1, 2, 3, 4]
    assert records[0].value.kind == formats.TOO_LARGE
    assert [record.value["text"] for record in records[1:]] == TEXTS
