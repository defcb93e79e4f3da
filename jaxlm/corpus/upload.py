"""A finished folder, copied to an object store or any other place that fsspec writes to."""

import functools
import shlex
from pathlib import Path
from typing import Any

from jaxlm.core.errors import NotWritable
from jaxlm.corpus.job import CLUSTERS, PAGE, RECIPE, REPORT
from jaxlm.corpus.mix.after import SHARDS
from jaxlm.corpus.mix.run import MIX
from jaxlm.corpus.remote import Changed, open_store, said, tried
from jaxlm.corpus.run import LOCK


def copy_to(folder: Path, files: list[str], url: str) -> int:
    """Copies a finished run, its report when all else is there, and gives how many files; none where they all are.

    Raises:
      InputMissing: where the store cannot be asked.
      NotWritable: where something else is there, or a file cannot be written after several tries.
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
    """Copies files, of which the first says what they all are, and the last that they are all there.

    `other` is the flag of a place that holds nothing yet.
    """
    store, root = open_store(url)
    first, last = names[0], names[-1]
    try:
        for name in (last, first):
            there = store.cat_file(f"{root}/{name}") if store.exists(f"{root}/{name}") else None
            if there is not None and there != (folder / name).read_bytes():
                raise NotWritable(
                    "the place holds something else",
                    where=f"{url}/{name}",
                    why="nothing is overwritten",
                    fix=other,
                )
            if name == last and there is not None:
                return 0
        for name in names:
            tried(functools.partial(_put, store, folder / name, f"{root}/{name}"))
    except NotWritable:
        raise
    except Exception as error:
        raise NotWritable(
            "the output cannot be copied",
            where=url,
            why=said(error),
            fix="the same command again: it is done but for the copy",
        ) from error
    return len(names)


def _put(store: Any, path: Path, target: str) -> None:
    store.makedirs(target.rpartition("/")[0], exist_ok=True)
    store.put_file(str(path), target)
    if (size := store.info(target)["size"]) != path.stat().st_size:
        raise Changed(f"{size:,} of {path.stat().st_size:,} bytes are there")
