"""Readers of formats with one document in a file: plain text, source code, HTML, PDF."""

import dataclasses
import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from jaxlm.core.errors import not_installed
from jaxlm.corpus.config import ReadLimits
from jaxlm.corpus.document import CorpusDocument
from jaxlm.corpus.readers.encoding import decoded, python_cookie
from jaxlm.corpus.readers.main_text import charset, main_text
from jaxlm.corpus.readers.streams import DAMAGED, RawFile, Records, whole
from jaxlm.data.records import mended

TOO_SLOW = "too slow"
PROGRAM = Path(__file__).with_name("pdf_program.py")
_WAITED = 20  # times the CPU limit, after which a process that does not compute is ended


def plain(stream: IO[bytes], file: RawFile) -> Records:
    """Yield the file, in any encoding."""
    yield _document(whole(stream, file.most), file)


def python(stream: IO[bytes], file: RawFile) -> Records:
    """Yield Python source, in its declared encoding."""
    data = whole(stream, file.most)
    yield _document(data, file, python_cookie(data))


def html(stream: IO[bytes], file: RawFile) -> Records:
    """Yield the main text of a page; the title is metadata."""
    data = whole(stream, file.most)
    page = _document(data, file, charset(data))
    title, text = main_text(page.text, file.counts)
    yield page.with_text(text, title=title)


def _document(data: bytes, file: RawFile, declared: str = "") -> CorpusDocument:
    text, encoding = decoded(data, declared)
    if encoding == "utf-8":
        return CorpusDocument(text, file.name, 1)
    file.counts[f"read as {encoding}"] += 1
    return CorpusDocument(text, file.name, 1, {"encoding": encoding})


def pdf(stream: IO[bytes], file: RawFile) -> Records:
    """Yield the text of all pages, separated by empty lines; the title is metadata.

    Raises InputMissing if pypdf is not installed.
    """
    if importlib.util.find_spec("pypdf") is None:
        raise not_installed("reading PDF", "pypdf", "prepare", where=file.name)
    answer = _answer(whole(stream, file.most), file.recipe.reading)
    if "kind" in answer:
        yield file.broken(answer["kind"], 1, answer["detail"])
        return
    meta = {"title": mended(answer["title"], file.counts)} if answer["title"] else {}
    text = mended(answer["text"], file.counts)
    yield CorpusDocument(text, file.name, 1, {**meta, "pages": answer["pages"]})


def _answer(data: bytes, limits: ReadLimits) -> dict[str, Any]:
    """Return the answer of the reading process, or how it ended."""
    command = [sys.executable, "-P", str(PROGRAM), json.dumps(dataclasses.asdict(limits))]
    most = _WAITED * limits.pdf_seconds
    try:
        done = subprocess.run(
            command, input=data, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=most
        )
    except subprocess.TimeoutExpired:
        return {"kind": TOO_SLOW, "detail": "its process stood still"}
    if done.returncode == -signal.SIGXCPU:
        return {"kind": TOO_SLOW, "detail": f"more than {limits.pdf_seconds} seconds of a core"}
    if done.returncode == 0:
        return json.loads(done.stdout)
    return {"kind": DAMAGED, "detail": f"its process ended with {done.returncode}"}
