"""A finished folder, copied to an object store or any other place that fsspec writes to."""

import functools
from pathlib import Path
from typing import Any

from jaxlm.core.errors import NotWritable
from jaxlm.data.prepare.job import CLUSTERS, PAGE, RECIPE, REPORT
from jaxlm.data.prepare.remote import Changed, open_store, said, tried


def copy_to(folder: Path, files: list[str], url: str) -> int:
    """Copies a finished run, its report when all else is there, and gives how many files; none where they all are.

    Raises:
      InputMissing: where the store cannot be asked.
      NotWritable: where something else is there, or a file cannot be written after several tries.
    """
    store, root = open_store(url.rstrip("/"))
    names = [RECIPE, CLUSTERS, *files, PAGE, REPORT]
    try:
        for name in (REPORT, RECIPE):  # by these it is known what else is there
            there = store.cat_file(f"{root}/{name}") if store.exists(f"{root}/{name}") else None
            if there is not None and there != (folder / name).read_bytes():
                raise NotWritable(
                    "the place holds something else",
                    where=f"{url}/{name}",
                    why="nothing is overwritten",
                    fix=f"--copy_to={url.rstrip('/')}-2",
                )
            if name == REPORT and there is not None:
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
