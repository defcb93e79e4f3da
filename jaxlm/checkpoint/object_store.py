"""Checkpoints on an object store: written locally, uploaded, and committed by one object.

An object store has no rename. The files of a step are uploaded below the step's prefix, and its
record, `digests.json`, is written last: a prefix without it is no checkpoint. A removal begins with
the record. Copies on the local disk are of the step that is being saved, or of the one being read.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from etils import epath

from jaxlm.checkpoint import objects
from jaxlm.checkpoint import record as records
from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.objects import ObjectPath
from jaxlm.checkpoint.record import FileDigests
from jaxlm.checkpoint.store import Store
from jaxlm.core import faults
from jaxlm.core.errors import ANOTHER, JaxlmError, NotWritable, cannot_keep, listed
from jaxlm.monitor import formatting

OWNER = "owner.json"  # names the process that may commit
QUARANTINE = "quarantine"
METADATA = "array_metadatas"  # Orbax's folder of facts about the arrays
PARTIAL = ".partial"  # suffix of a file until all of it has arrived
THREADS = 16  # requests at a time
T = TypeVar("T")
R = TypeVar("R")


class ObjectStore(Store):
    """A `Store` whose steps are at `config.directory`, the URL of an object store.

    No disk is shared: each process uploads the files that it wrote, and downloads a step to read
    it. `directory` of the constructor is local: `process-N` inside has the files of process N, and
    the first process keeps an empty file there for each committed step.
    The newest process that opened the store for writing owns it; an older one commits nothing more.
    """

    # A process can merge the arrays of others only on a shared disk, so each array has its files.
    is_packed = False

    def __init__(self, directory: epath.PathLike, config: CheckpointConfig, **options: Any):
        self.removed: list[str] = []  # what killed processes had left, by name
        super().__init__(directory, config, **options)
        is_lock_owner = self._is_owner
        self._is_owner = lambda: is_lock_owner() and self._is_named()

    def _place(self, config: CheckpointConfig) -> ObjectPath:
        assert config.directory is not None
        return ObjectPath(config.directory)

    @property
    def another(self) -> str:
        """The flags that name other places for a run and its checkpoints."""
        return f"{ANOTHER} --config.checkpoint.directory={self.directory}-2"

    def steps(self) -> list[int]:
        """Return the steps that have a record, oldest first; they may be damaged."""
        numbers = [name for name in self.directory.names() if name.isdigit()]
        marks = _each(lambda name: (self.directory / name / records.NAME).is_file(), numbers)
        return sorted(int(name) for name, mark in zip(numbers, marks, strict=True) if mark)

    def written(self, step: int) -> float:
        """Return the time at which a step was committed, in seconds since 1970."""
        return (self._path(step) / records.NAME).modified()

    def quarantine(self, step: int, reason: str) -> Any:
        """Copy a step below `quarantine/` inside the store, then remove it."""
        folder = self.directory / QUARANTINE
        taken, number = set(folder.names()), 1
        while (name := f"{step}" if number == 1 else f"{step}.{number}") in taken:
            number += 1
        source, target = self._path(step), folder / name
        _each(lambda path: (source / path).copy_to(target / path), source.sizes())
        (folder / f"{name}.reason.txt").write_bytes(f"{reason}\n".encode())
        _remove([source])
        (self.local / source.name).unlink(missing_ok=True)
        return target

    def quarantined(self) -> list[tuple[str, str | None]]:
        """Return the URL of each step in quarantine, and the reason if it is known."""
        rows: list[tuple[str, str | None]] = []
        folder = self.directory / QUARANTINE
        for name in folder.names():
            if not name.endswith(".reason.txt"):
                reason = None
                with contextlib.suppress(FileNotFoundError):
                    reason = (folder / f"{name}.reason.txt").read_bytes().decode().strip()
                rows.append((str(folder / name), reason))
        return rows

    def save(self, step: int, state: Any, meta: dict[str, Any], **options: Any) -> None:
        """Do what `Store.save` does; copies of earlier steps on the local disk are removed."""
        self.wait()
        self._clear_local()
        if not self._is_first:  # Orbax creates both folders in the first process, and waits here
            (self._torn(step) / METADATA).mkdir(parents=True, exist_ok=True)
        super().save(step, state, meta, **options)

    def wait(self) -> None:
        """Do what `Store.wait` does, and remove the local copy of the step."""
        super().wait()
        if self._pending is not None:
            shutil.rmtree(self._staged(self._pending.step), ignore_errors=True)
            shutil.rmtree(self._torn(self._pending.step), ignore_errors=True)

    @property
    def notices(self) -> list[str]:
        """A line about the uncommitted steps that were removed."""
        if not self.removed:
            return []
        names = ", ".join(self.removed)
        return [f"removed {len(self.removed)} uncommitted of {self.directory}: {names}"]

    def release(self) -> None:
        """Do what `Store.release` does, and remove local copies."""
        super().release()
        self._clear_local()

    def remove_torn(self) -> None:
        """Remove prefixes without a record, and local files; ignore what cannot be removed."""
        self._clear_local()
        with contextlib.suppress(JaxlmError, OSError):
            if not self._is_owner():
                return
            names = [name for name in self.directory.names() if name.isdigit()]
            committed = set(map(str, self.steps()))
            torn = [name for name in names if name not in committed]
            _remove([self.directory / name for name in torn])
            self.removed += torn

    def _open(self) -> None:
        """Check that the store can be written, take it over, and remove what was left."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_keep("the folder of checkpoints", self._folder, error) from error
        self._clear_local()
        if not self._is_first:
            return
        objects.check_writable(self.directory, f"probe-{self._writer.owner or 'jaxlm'}")
        (self.directory / OWNER).write_bytes(json.dumps({"fence": self._writer.owner}).encode())
        self.remove_torn()
        steps = set(map(str, self.steps()))
        for path in self.local.iterdir():
            if path.name.isdigit() and path.name not in steps:
                path.unlink()
        for step in steps:
            (self.local / step).touch()

    @functools.cached_property
    def _folder(self) -> epath.Path:
        """The local folder of this process."""
        if not self._read_only:
            return self.local / f"process-{self._peers.rank}"
        folder = tempfile.mkdtemp(prefix="jaxlm-step-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return epath.Path(folder)

    def _clear_local(self) -> None:
        for path in self._folder.glob("*"):
            shutil.rmtree(path, ignore_errors=True)

    def _is_named(self) -> bool:
        """Return whether no later process has taken the checkpoints over."""
        try:
            return json.loads((self.directory / OWNER).read_bytes())["fence"] == self._writer.owner
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False

    def _staged(self, step: int) -> epath.Path:
        return self._folder / str(step)

    def _sync(self, *, key: str, timeout_ms: int) -> None:
        """Upload the files of this process before the first wait for the others."""
        begun = time.monotonic()
        if self._own is None:
            assert self._pending is not None
            step = self._pending.step
            self._own = self._upload(step)
            parts = self._peers.gather("digests", self._own, self._save_seconds)
            if self._is_first:
                self._own = _merged(parts)
                self._fetch_metadata(step)
        self._wait_for_others(key, timeout_ms - int(1000 * (time.monotonic() - begun)))

    def _fetch_metadata(self, step: int) -> None:
        """Download the facts that others wrote about their arrays: Orbax compares them."""
        assert self._own is not None
        for path in self._own:
            file = self._torn(step) / path
            if path.startswith(f"{METADATA}/") and not file.exists():
                file.write_bytes((self._path(step) / path).read_bytes())

    def _complete(self) -> None:
        """Upload the rest of the step, and its record last: with it the step is committed."""
        assert self._pending is not None
        step = self._pending.step
        faults.point("save.digest", step)
        files = self._own or {}
        files |= self._upload(step, files)
        self._refuse_if_lost(step)
        self._retire()
        faults.point("save.commit", step)
        self._refuse_if_lost(step)
        record = dataclasses.replace(self._pending, files=files)
        (self._path(step) / records.NAME).write_bytes(record.text().encode())
        (self.local / str(step)).touch()

    def _upload(self, step: int, known: Container[str] = ()) -> FileDigests:
        """Upload the files of a step that this process wrote; return size and sha256 of each."""
        source, target = self._torn(step), self._path(step)
        files = records.digests(source, lambda path: path not in known)

        def send(path: str) -> None:
            faults.point("save.upload", step)
            (target / path).upload(source / path)
            if (size := (target / path).size()) != files[path][0]:
                raise RuntimeError(f"{target / path} has {size} bytes of {files[path][0]}")

        _each(send, files)
        return files

    def _discard(self, steps: set[int]) -> None:
        """Remove the records of steps, and in the background the rest."""
        prefixes = [self._path(step) for step in sorted(steps)]
        for prefix in prefixes:
            (prefix / records.NAME).unlink()
            (self.local / prefix.name).unlink(missing_ok=True)
            faults.point("save.retire", int(prefix.name))
        if prefixes:
            self._removal = self._remover.submit(_remove, prefixes)

    def _readable(self, step: int, part: str | None = None) -> epath.Path:
        """Download what a part of a step needs, and compare it with the record."""
        source, target = self._path(step), self._folder / "read" / str(step)
        expected = {
            path: entry
            for path, entry in self.record(step).files.items()
            if _is_needed(path, part) and not (target / path).exists()
        }
        for other in self._folder.glob("read/*"):
            if other != target:
                shutil.rmtree(other, ignore_errors=True)
        target.mkdir(parents=True, exist_ok=True)
        _check_room(target, source, sum(size for size, _ in expected.values()))

        def fetch(path: str) -> str | None:
            """Return the problem of a file, None if it is as written."""
            partial = target / f"{path}{PARTIAL}"
            partial.parent.mkdir(parents=True, exist_ok=True)
            digest, size = hashlib.sha256(), 0
            try:
                with (source / path).open() as reader, partial.open("wb") as file:
                    while chunk := reader.read(records.CHUNK_BYTES):
                        file.write(chunk)
                        digest.update(chunk)
                        size += len(chunk)
                        self.verifier.moved()
            except FileNotFoundError:
                return f"{path} is missing"
            if (size, digest.hexdigest()) != expected[path]:
                return f"{path} has other contents than were written"
            partial.rename(target / path)
            return None

        if problems := [each for each in _each(fetch, expected) if each]:
            raise records.damaged(source, listed(problems[:4], 4))
        return target


def _merged(parts: Iterable[Mapping[str, Sequence[Any]]]) -> FileDigests:
    """Merge the digests of the processes. Raises RuntimeError if files of one name differ."""
    files: FileDigests = {}
    for part in parts:
        for path, (size, digest) in part.items():
            if files.setdefault(path, (size, digest)) != (size, digest):
                raise RuntimeError(f"two processes wrote {path}")
    return files


def _is_needed(path: str, part: str | None) -> bool:
    """Return whether a file of a step belongs to a part, or describes the arrays."""
    name = path.rpartition("/")[2]
    describes = "/" not in path or name.startswith(".") or path.startswith(f"{METADATA}/")
    return part is None or describes or path.startswith(f"{part}.")


def _check_room(folder: epath.Path, source: ObjectPath, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise NotWritable(
            "the local disk is too small for a checkpoint of the object store",
            where=str(folder),
            why=f"{source} needs {formatting.size(size)}, and {formatting.size(free)} are free",
            fix="free space there; TMPDIR names the folder of commands that only read",
        )


def _remove(prefixes: Iterable[ObjectPath]) -> None:
    """Remove all objects of steps, the records first: half a step must not look like one."""
    for prefix in prefixes:
        (prefix / records.NAME).unlink()
        _each(ObjectPath.unlink, [prefix / path for path in prefix.sizes()])


def _each(action: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return the result of an action for each item; the actions run at the same time."""
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(action, items))


def opened(directory: epath.PathLike, config: CheckpointConfig, **options: Any) -> Store:
    """Return the checkpoints of a run, on an object store if the config names one.

    Args:
      directory: the folder of checkpoints in the run directory.
      config: with the URL and the steps to keep.
      options: of `Store`.
    """
    kind = Store if config.directory is None else ObjectStore
    return kind(directory, config, **options)


def of_run(workdir: Path, **options: Any) -> Store:
    """Return the checkpoints of a run to read; `config.json` names their place."""
    config = CheckpointConfig(directory=url_of(workdir))
    return opened(workdir / "checkpoints", config, read_only=True, **options)


def of_url(url: str, **options: Any) -> Store:
    """Return the checkpoints at a URL to read; local copies are removed with the store."""
    folder = tempfile.mkdtemp(prefix="jaxlm-")
    store = opened(Path(folder), CheckpointConfig(directory=url), read_only=True, **options)
    weakref.finalize(store, shutil.rmtree, folder, ignore_errors=True)
    return store


def url_of(workdir: Path) -> str | None:
    """Return the URL of the checkpoints of a run; None if they are in the run directory."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        config = json.loads((workdir / "config.json").read_bytes())
        return CheckpointConfig(directory=config["checkpoint"]["directory"]).directory
    return None
