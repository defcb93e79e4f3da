"""Size of the text of a corpus, estimated from a sample of its records.

The bytes on disk are another number: records have other fields, and files are compressed.
"""

from pathlib import Path

from jaxlm.data import formats, records
from jaxlm.data.documents import Corpus
from jaxlm.data.records import Document, LeftOut, ReadBudget

SAMPLE_BYTES = 2**27  # unpacked bytes that are read in all: about a second of JSON
LEAST_SAMPLE = 2**23  # of each file that is read; a block of bzip2 has 900 kB


def text_bytes(corpus: Corpus, sample: int = SAMPLE_BYTES) -> int:
    """Return the bytes of the text of a corpus in UTF-8.

    Files of text have their size on disk. Of records and compressed files the beginnings of
    evenly spaced files are read; their share of text applies to the rest.

    Args:
      corpus: files of text or of records.
      sample: unpacked bytes to read, at least `LEAST_SAMPLE` of one file.

    Raises:
      DataError: if a file that is read is damaged.
    """
    sizes = {path: path.stat().st_size for path in corpus.files}
    others = [path for path in corpus.files if not _is_plain(path)]
    plain = sum(sizes.values()) - sum(sizes[path] for path in others)
    if not others:
        return plain
    count = min(len(others), max(sample // LEAST_SAMPLE, 1))
    chosen = [others[number * len(others) // count] for number in range(count)]
    names = dict(zip(corpus.files, corpus.names, strict=True))
    text = disk = 0.0
    for path in chosen:
        budget = max(sample // count, LEAST_SAMPLE)
        text += _file_text(path, names[path], corpus.text_key, budget)
        disk += sizes[path]
    rest = sum(sizes[path] for path in others) - disk
    return plain + round(text + rest * text / max(disk, 1))


def _is_plain(path: Path) -> bool:
    return records.is_text(path) and not formats.is_packed(path.name)


def _file_text(path: Path, name: str, text_key: str, budget: int) -> float:
    """Return the bytes of text of a file; at most `budget` unpacked bytes are read."""
    size = path.stat().st_size
    if records.is_text(path):
        with open(path, "rb") as file, formats.unpacked(file, path.name) as stream:
            data = stream.read(budget)
            is_cut, place = len(data) == budget, file.tell()
        return len(data) * (size / max(place, 1) if is_cut else 1)
    start = ReadBudget(-1, budget)  # of bytes alone
    text = place = 0
    for each in records.read(path, name, text_key, LeftOut(), start):
        if isinstance(each, Document):
            text, place = text + len(each.text.encode("utf-8", "surrogatepass")), each.place
        if start.is_read:
            break
    if not start.is_read:
        return text
    return text * size / place if place else size  # a record longer than the budget has no place
