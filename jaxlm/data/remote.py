"""Data behind URLs and data sets of the Hugging Face Hub, copied into the cache before it is read.

A file is copied whole before it is parsed, so a lost connection never looks like damage. A copy is
kept for each version that the store reports, and what was found is recorded: if the store does not
answer later, the recorded copies are used, with a message.
"""

import dataclasses
import functools
import json
import posixpath
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.core import disk, hub
from jaxlm.core.callbacks import Log, OnProgress
from jaxlm.core.errors import DataError, InputMissing, NotWritable
from jaxlm.data import cache, hub_dataset, stores
from jaxlm.data.hub_dataset import Flag
from jaxlm.data.manifest import NAME as MANIFEST
from jaxlm.data.stores import StoredFile
from jaxlm.monitor import formatting


def is_remote(pattern: str) -> bool:
    """Return whether an entry of `data.train` names data that is not in the file system.

    Example:
      >>> is_remote("hf:org/texts"), is_remote("s3://bucket/*.jsonl"), is_remote("texts/*.txt")
      (True, True, False)
    """
    return stores.is_url(pattern) or pattern.startswith(hub.PREFIX)


def check(pattern: str, setting: str) -> None:
    """Raise an error if a name is malformed or the package that reads it is not installed."""
    if pattern.startswith(hub.PREFIX):
        name = hub_dataset.parsed(pattern, setting)
        hub.HubRepository(name.name, name.revision, "dataset", f"{setting} = {pattern}")
    else:
        stores.open_store(pattern)


class LocalCopy(NamedTuple):
    """A copy of a remote file: its path, its name in reports, and bytes."""

    path: Path
    name: str
    size: int


@dataclasses.dataclass(frozen=True)
class Downloads:
    """The copies of remote files under a cache folder."""

    root: Path | None = None  # the default cache if None
    log: Log = lambda _: None
    progress: OnProgress = lambda what, done, total: None  # called with bytes

    def files(self, pattern: str, setting: str, flag: Flag) -> dict[Path, str]:
        """Return the copy of every file that a pattern names, and its name; download what lacks.

        Args:
          pattern: a URL, with or without wildcards, or `hf:ORG/NAME...`.
          setting: path of the setting that contains it, for errors.
          flag: makes the flag that has another entry instead of this.

        Raises:
          InputMissing: if nothing is found, or a store does not answer and there is no copy.
          DataError: if a file has another sha256 than the hub lists.
          NotWritable: if the disk is too small.
        """
        find = functools.partial(self._found, pattern, setting, flag)
        try:
            copies = self._recorded(pattern, find)
        except _Unreachable as error:
            raise error.error from error
        return {copy.path: copy.name for copy in copies}

    def shards(self, pattern: str) -> Path | None:
        """Return the copy of a folder of token shards; None if the pattern names no such folder.

        It is None too if the store does not answer and there is no copy: `files` raises the error.
        Raises the other errors of `files`.
        """
        if not stores.is_url(pattern) or any(letter in pattern for letter in "*?["):
            return None
        url = pattern.rstrip("/")
        try:
            copies = self._recorded(f"{url}/", functools.partial(self._shard_files, url))
        except (_NoShards, _Unreachable):
            return None
        return copies[0].path.parent

    def _shard_files(self, url: str) -> list[LocalCopy]:
        """Return copies of a folder of token shards. Raises _NoShards if it is none."""
        store, path = stores.open_store(url)
        try:
            # `exists` of fsspec takes a store that does not answer for one without the file.
            manifest = stores.tried(lambda: stores.matching(store, posixpath.join(path, MANIFEST)))
            listed = stores.tried(lambda: stores.matching(store, posixpath.join(path, "*")))
        except Exception as error:  # errors of stores have no common base
            raise _Unreachable(_unanswered(url, stores.described(error))) from error
        if not manifest:
            raise _NoShards
        versions = [list(each) for each in sorted(listed)]
        folder = cache.folder(self._root, "remote", folder=url, files=versions)
        with cache.building(folder) as partial:
            if partial is not None:
                self._announce(url, [each.size for each in listed], self._root)
                for file in listed:
                    self._copy(store, file, partial / posixpath.basename(file.url))
        names = [(posixpath.basename(file.url), file) for file in listed]
        return [LocalCopy(folder / name, file.url, file.size) for name, file in names]

    @property
    def _root(self) -> Path:
        return cache.default() if self.root is None else self.root

    def _recorded(self, pattern: str, find: Callable[[], list[LocalCopy]]) -> list[LocalCopy]:
        """Return what `find` finds, and record it; if the store is unreachable, the record.

        Raises _Unreachable if there is no record either.
        """
        place = self._record(pattern)
        try:
            copies = find()
        except _Unreachable as error:
            copies, seconds = _read(place)
            if not copies:
                raise
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
            self.log(f"{error.error.what}; using the {len(copies)} files copied on {when}")
            return copies
        rows = [[str(copy.path), copy.name, copy.size] for copy in copies]
        with cache.writing(place):
            disk.replace(place, json.dumps({"time": time.time(), "files": rows}).encode())
        return copies

    def _record(self, pattern: str) -> Path:
        """Return the file that records the copies of a pattern."""
        return cache.folder(self._root, "remote", pattern=pattern).with_suffix(".json")

    def _found(self, pattern: str, setting: str, flag: Flag) -> list[LocalCopy]:
        if pattern.startswith(hub.PREFIX):
            return self._of_hub(pattern, setting, flag)
        return self._of_store(pattern, setting, flag)

    def _of_store(self, pattern: str, setting: str, flag: Flag) -> list[LocalCopy]:
        store, path = stores.open_store(pattern)
        try:
            listed = stores.tried(lambda: stores.matching(store, path))
        except Exception as error:  # errors of stores have no common base
            raise _Unreachable(_unanswered(pattern, stores.described(error))) from error
        if not listed:
            raise InputMissing(
                f"no file matches {pattern}",
                where=setting,
                why="the store has none of this name",
                fix=flag("stdlib:validation")
                if setting.startswith("--")
                else f"jaxlm config explain {setting}",
            )
        folders = {
            file: cache.folder(self._root, "remote", **file._asdict()) for file in sorted(listed)
        }
        names = {file: posixpath.basename(stores.path_in(file.url)) for file in folders}
        missing = [file for file, folder in folders.items() if not folder.exists()]
        if missing:
            self._announce(pattern, [file.size for file in missing], self._root)
        for file in missing:
            with cache.building(folders[file]) as partial:
                if partial is not None:
                    self._copy(store, file, partial / names[file])
        return [
            LocalCopy(folder / names[file], file.url, file.size) for file, folder in folders.items()
        ]

    def _copy(self, store: Any, file: StoredFile, target: Path) -> None:
        """Copy a file of a store; raises InputMissing if it does not arrive whole."""

        def fetch() -> None:
            with open(target, "wb") as copy:
                stores.copy(store, file.url, file.size or None, copy, full, moved)

        def full(_: OSError) -> NotWritable:
            return _full(self._root, file.url, file.size)

        def moved(done: int) -> None:
            self.progress(f"copying {target.name}", done, max(file.size, done))

        try:
            stores.tried(fetch)
        except NotWritable:
            raise
        except Exception as error:  # errors of stores have no common base
            raise InputMissing(
                f"a file could not be copied in {stores.TRIES} tries",
                where=file.url,
                why=stores.described(error),
                fix="the same command again: copied files are kept",
            ) from error

    def _of_hub(self, pattern: str, setting: str, flag: Flag) -> list[LocalCopy]:
        name = hub_dataset.parsed(pattern, setting)
        where = f"{setting} = {pattern}"
        repository = hub.HubRepository(
            name.name, name.revision, "dataset", where, self.progress, flag
        )
        try:
            info = repository.info()
        except hub.HubUnreachable as error:
            raise _Unreachable(error) from error
        listed = {each.rfilename: each for each in info.siblings or ()}
        card = info.card_data.to_dict() if info.card_data else {}
        chosen = hub_dataset.files_of(name, list(listed), card, setting, flag)
        known = {copy.name: copy for copy in _read(self._record(pattern))[0]}
        names = {file: f"{hub.PREFIX}{name.name}@{info.sha}/{file}" for file in chosen}
        missing = [file for file in chosen if names[file] not in known]
        if missing:
            self._announce(str(name), [listed[file].size or 0 for file in missing], hub.cache())
            if name.revision != info.sha:
                pinned = name._replace(revision=info.sha)
                self.log(f"{name} is now {info.sha[:12]}; {pinned} always names these files")
        copies = []
        for file in chosen:
            if names[file] in known:
                copies.append(known[names[file]])
                continue
            path = repository.download(file, info.sha)
            sha256 = getattr(listed[file].lfs, "sha256", None)
            if sha256 is not None and disk.sha256(path) != sha256:
                raise DataError(
                    "a file differs from the one that the hub lists",
                    where=f"{where}: {file}",
                    why=f"its sha256 is not {sha256[:12]}...: it was damaged on the way",
                    fix=f"rm {path.resolve()}    # and the same command again",
                )
            copies.append(LocalCopy(path, names[file], path.stat().st_size))
        return copies

    def _announce(self, name: str, sizes: list[int], root: Path) -> None:
        """Log what will be copied. Raises NotWritable if the disk has no room for it."""
        total, files = sum(sizes), f"{len(sizes)} file{'s' if len(sizes) > 1 else ''}"
        if shutil.disk_usage(root).free < total:
            raise _full(root, name, total)
        self.log(f"copying {files} of {name}, {formatting.size(total)}, into {root}")


SILENT = Downloads()  # into the default cache


class _NoShards(Exception):
    """A URL is not a folder of token shards."""


class _Unreachable(Exception):
    """A store did not answer; `error` is raised if there is no earlier copy."""

    def __init__(self, error: InputMissing):
        super().__init__(error.what)
        self.error = error


def _read(place: Path) -> tuple[list[LocalCopy], float]:
    """Return recorded copies that are still whole, and when they were found; else none."""
    try:
        recorded = json.loads(place.read_text())
        copies = [LocalCopy(Path(path), name, size) for path, name, size in recorded["files"]]
        seconds = float(recorded["time"])
        if all(copy.path.stat().st_size == copy.size for copy in copies if copy.size):
            return copies, seconds
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return [], 0.0


def _unanswered(pattern: str, why: str) -> InputMissing:
    what, fix = f"{pattern} could not be listed", "the same command again: copied files are kept"
    return InputMissing(what, where=pattern, why=why, fix=fix)


def _full(root: Path, name: str, size: int) -> NotWritable:
    free = formatting.size(shutil.disk_usage(root).free)
    variable = "JAXLM_CACHE" if root == cache.default() else "HF_HOME"
    return NotWritable(
        "the disk of the cache is too small for a copy",
        where=str(root),
        why=f"{name} has {formatting.size(size)}, {free} are free",
        fix=f"export {variable}=/mnt/larger/cache    # a folder on a larger disk",
    )
