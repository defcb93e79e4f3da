"""The size of a text is that of the field of its records, also if the files are compressed."""

import bz2
import gzip
import json
import lzma
import random
import shutil

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from jaxlm.data.documents import Corpus
from jaxlm.data.text_size import LEAST_SAMPLE, text_bytes

PACK = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
}


def records(count: int) -> list[dict[str, str]]:
    """Return records whose text is a small share of their bytes."""
    draw = random.Random(0)
    words = ["\u00e9tude", "beta", "gamma", "delta"]
    return [
        {
            "id": str(number),
            "html": draw.randbytes(draw.randrange(200, 400)).hex(),
            "body": " ".join(draw.choices(words, k=30)),
        }
        for number in range(count)
    ]


def written(path, rows: list[dict[str, str]]) -> int:
    """Write records, or their texts, and return the bytes of their texts."""
    texts = [each["body"] for each in rows]
    lines = "".join(json.dumps(each) + "\n" for each in rows)
    if path.suffix == ".parquet":
        columns = {name: [each[name] for each in rows] for name in rows[0]}
        pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=100)
    else:
        data = "\n".join(texts) if ".txt" in path.suffixes else lines
        path.write_bytes(PACK.get(path.suffix[1:], bytes)(data.encode()))
    return sum(len(each.encode()) for each in texts)


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.json", "a.ndjson", "a.parquet", "a.jsonl.gz", "a.jsonl.zst", "a.jsonl.xz"],
)
def test_only_the_field_of_the_text_counts(tmp_path, name):
    """400 records of 359 kB of text and 7 MB of another field were 7 MB."""
    expected = written(tmp_path / name, records(400))
    corpus = Corpus.find((str(tmp_path / name),), "body", "--data")
    assert text_bytes(corpus) == expected


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.bz2", "a.txt.xz", "a.txt.zst"])
def test_a_text_has_its_unpacked_size(tmp_path, name):
    size = written(tmp_path / name, records(400)) + 399  # line ends
    corpus = Corpus.find((str(tmp_path / name),), "text", "--data")
    assert text_bytes(corpus) == size


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.parquet", "a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.txt.bz2"]
)
def test_large_files_are_estimated_from_their_beginning(tmp_path, name):
    rows = records(50_000 if ".txt" in name else 20_000)
    expected = written(tmp_path / f"0{name}", rows) + (len(rows) - 1 if ".txt" in name else 0)
    for number in range(1, 4):
        shutil.copy(tmp_path / f"0{name}", tmp_path / f"{number}{name}")
    corpus = Corpus.find((f"{tmp_path}/*",), "body", "--data")
    assert text_bytes(corpus, 2 * LEAST_SAMPLE) == pytest.approx(4 * expected, rel=0.1)
