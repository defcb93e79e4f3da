"""Readers of formats with one document in a file: plain text, Markdown, source code, HTML."""

from collections import Counter
from collections.abc import Iterator
from typing import IO

from jaxlm.corpus.config import Recipe
from jaxlm.corpus.document import CorpusDocument
from jaxlm.corpus.readers.encoding import decoded, python_cookie
from jaxlm.corpus.readers.main_text import charset, main_text
from jaxlm.corpus.readers.streams import whole


def plain(
    stream: IO[bytes], name: str, recipe: Recipe, counts: Counter[str]
) -> Iterator[CorpusDocument]:
    """Yield the file, in any encoding."""
    yield _document(whole(stream, recipe.reading.document_bytes), name, "", counts)


def python(
    stream: IO[bytes], name: str, recipe: Recipe, counts: Counter[str]
) -> Iterator[CorpusDocument]:
    """Yield Python source, in its declared encoding."""
    data = whole(stream, recipe.reading.document_bytes)
    yield _document(data, name, python_cookie(data), counts)


def html(
    stream: IO[bytes], name: str, recipe: Recipe, counts: Counter[str]
) -> Iterator[CorpusDocument]:
    """Yield the main text of a page; the title is metadata."""
    data = whole(stream, recipe.reading.document_bytes)
    page = _document(data, name, charset(data), counts)
    title, text = main_text(page.text, counts)
    yield page.with_text(text, title=title)


def _document(data: bytes, name: str, declared: str, counts: Counter[str]) -> CorpusDocument:
    text, encoding = decoded(data, declared)
    if encoding == "utf-8":
        return CorpusDocument(text, name, 1)
    counts[f"read as {encoding}"] += 1
    return CorpusDocument(text, name, 1, {"encoding": encoding})
