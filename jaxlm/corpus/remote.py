"""Files in object stores and behind other URLs, through fsspec.

A file is downloaded whole before it is parsed, so a lost connection never looks like damage.
"""

import tempfile
from pathlib import Path
from typing import IO

from jaxlm.core import problems
from jaxlm.core.errors import DataError, InputMissing, NotWritable
from jaxlm.corpus.config import Recipe
from jaxlm.data import stores
from jaxlm.data.documents import Corpus


def find(recipe: Recipe) -> list[tuple[Path, str, int]]:
    """Return path, name and size of every source file of a recipe, by name; a URL is its own name.

    Raises InputMissing if a pattern matches no file or a store does not answer, DataError if two
    patterns match one file.
    """
    local = tuple(pattern for pattern in recipe.source if not stores.is_url(pattern))
    corpus = Corpus.find(local, recipe.text_key, "source")
    files = {
        name: (path, name, path.stat().st_size)
        for path, name in zip(corpus.files, corpus.names, strict=True)
    }
    for pattern in filter(stores.is_url, recipe.source):
        for name, size in _matches(pattern, recipe.source):
            if name in files:
                what = "a file is listed twice"
                why = f"{pattern} matches {name}, as does a pattern before it"
                raise DataError(what, where="source", why=why, fix="patterns that do not overlap")
            files[name] = Path(name), name, size
    return [files[name] for name in sorted(files)]


def fetched(name: str) -> IO[bytes]:
    """Download the file behind a URL into a temporary file, which is deleted when it is closed.

    Raises InputMissing if it cannot be read in several tries, NotWritable if the disk is full.
    """
    store, path = stores.open_store(name)

    def fetch() -> IO[bytes]:
        copy = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        try:
            stores.copy(store, path, store.info(path)["size"], copy, _full)
            copy.seek(0)
        except BaseException:
            copy.close()
            raise
        return copy

    try:
        return stores.tried(fetch)
    except NotWritable:
        raise
    except Exception as error:  # errors of stores have no common base
        raise InputMissing(
            f"a file could not be downloaded in {stores.TRIES} tries",
            where=name,
            why=stores.described(error),
            fix="the same command again: finished work is kept",
        ) from error


def _matches(pattern: str, source: tuple[str, ...]) -> list[tuple[str, int]]:
    plain = tuple(each.rpartition("::")[2] if stores.is_url(each) else each for each in source)
    store, path = stores.open_store(pattern, problems.flag("source", plain))
    try:
        matches = [(file.url, file.size) for file in stores.matching(store, path)]
    except Exception as error:  # errors of stores have no common base
        raise _missing(f"{pattern} could not be listed", stores.described(error)) from error
    if not matches:
        raise _missing(f"no file matches {pattern}", "the store has none of this name")
    return matches


def _full(error: OSError) -> NotWritable:
    return NotWritable(
        "the disk is too full for a download",
        where=tempfile.gettempdir(),
        why=f"{type(error).__name__}: {error.strerror}",
        fix='export TMPDIR="$PWD/tmp" && mkdir -p "$TMPDIR"    # or a folder on a larger disk',
    )


def _missing(what: str, why: str) -> InputMissing:
    return InputMissing(what, where="source", why=why, fix="jaxlm config explain source")
