"""Copies of a finished folder in an object store, or wherever fsspec can write."""

import functools
import shlex
from pathlib import Path
from typing import Any

from jaxlm.core.errors import NotWritable
from jaxlm.corpus.job import CLUSTERS, PAGE, RECIPE, REPORT
from jaxlm.corpus.mix.after import SHARDS
from jaxlm.corpus.mix.run import MIX
from jaxlm.corpus.run import LOCK
from jaxlm.data.stores import SizeMismatch, described, open_store, tried


def copy_to(folder: Path, files: list[str], url: str) -> int:
    """Copy a finished run, the report last; return the number of files, 0 if already done.

    Raises InputMissing if the store does not answer, NotWritable if the target contains other files
    or a file cannot be written in several tries.
    """
    url = url.rstrip("/")
    other = shlex.quote(f"--copy_to={url}-2")
    count = _copied(folder, [RECIPE, CLUSTERS, *files, PAGE, REPORT], url, other)
    shards = folder / SHARDS
    if (shards / MIX).exists():
        paths = (path for path in sorted(shards.rglob("*")) if path.is_file())
        names = [path.relative_to(shards).as_posix() for path in paths if path.name != LOCK]
        names.sort(key=lambda name: (name == MIX, name != RECIPE))
        count += _copied(shards, names, f"{url}/{SHARDS}", other)
    return count


def _copied(folder: Path, names: list[str], url: str, other: str) -> int:
    """Copy files: the first identifies the copy, the last marks it complete; `other` is a flag."""
    store, root = open_store(url)
    try:
        for name in (names[-1], names[0]):
            content = store.cat_file(f"{root}/{name}") if store.exists(f"{root}/{name}") else None
            if content is not None and content != (folder / name).read_bytes():
                what = "the target contains other files"
                why = "existing files are never overwritten"
                raise NotWritable(what, where=f"{url}/{name}", why=why, fix=other)
            if name == names[-1] and content is not None:
                return 0
        for name in names:
            tried(functools.partial(_put, store, folder / name, f"{root}/{name}"))
    except NotWritable:
        raise
    except Exception as error:
        raise NotWritable(
            "the output cannot be copied",
            where=url,
            why=described(error),
            fix="the same command again: only the copy is left to do",
        ) from error
    return len(names)


def _put(store: Any, path: Path, target: str) -> None:
    store.makedirs(target.rpartition("/")[0], exist_ok=True)
    store.put_file(str(path), target)
    if (size := store.info(target)["size"]) != path.stat().st_size:
        raise SizeMismatch(f"{size:,} of {path.stat().st_size:,} bytes arrived")
