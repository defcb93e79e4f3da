"""Readers of formats with one document in a file: plain text, source code, HTML, PDF."""

import importlib.util
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from jaxlm.core.errors import not_installed
from jaxlm.corpus.config import Recipe
from jaxlm.corpus.document import BrokenRecord, CorpusDocument
from jaxlm.corpus.readers.encoding import decoded, python_cookie
from jaxlm.corpus.readers.main_text import charset, main_text
from jaxlm.corpus.readers.streams import DAMAGED, whole
from jaxlm.data.records import mended


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


TOO_SLOW = "too slow"
PROGRAM = Path(__file__).with_name("pdf_program.py")
_WAITED = 20  # times the CPU limit, after which a process that does not compute is ended


def pdf(
    stream: IO[bytes], name: str, recipe: Recipe, counts: Counter[str]
) -> Iterator[CorpusDocument | BrokenRecord]:
    """Yield the text of all pages, separated by empty lines; the title is metadata.

    Raises InputMissing if pypdf is not installed.
    """
    if importlib.util.find_spec("pypdf") is None:
        raise not_installed("reading PDF", "pypdf", "prepare", where=name)
    limits = recipe.reading
    answer = _answer(
        whole(stream, limits.document_bytes),
        {
            "pages": limits.pdf_pages,
            "seconds": limits.pdf_seconds,
            "memory": limits.pdf_memory,
            "characters": limits.document_bytes,
        },
    )
    if "kind" in answer:
        yield BrokenRecord(answer["kind"], name, 1, answer["detail"])
        return
    meta = {"title": mended(answer["title"], counts)} if answer["title"] else {}
    yield CorpusDocument(
        mended(answer["text"], counts), name, 1, {**meta, "pages": answer["pages"]}
    )


def _answer(data: bytes, limits: dict[str, int]) -> dict[str, Any]:
    """Return the answer of the reading process, or how it ended."""
    words = [sys.executable, "-P", str(PROGRAM), json.dumps(limits)]
    try:
        done = subprocess.run(
            words,
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_WAITED * limits["seconds"],
        )
    except subprocess.TimeoutExpired:
        return {"kind": TOO_SLOW, "detail": "its process stood still"}
    if done.returncode == -signal.SIGXCPU:
        return {"kind": TOO_SLOW, "detail": f"more than {limits['seconds']} seconds of a core"}
    if done.returncode == 0:
        return json.loads(done.stdout)
    return {"kind": DAMAGED, "detail": f"its process ended with {done.returncode}"}
