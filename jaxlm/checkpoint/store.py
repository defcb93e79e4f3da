"""Checkpoint store on Orbax: a tree of arrays and JSON, committed one step at a time."""

import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import re
import shlex
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from etils import epath

from jaxlm.checkpoint import record as records
from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.record import StepRecord
from jaxlm.checkpoint.verify import Verifier
from jaxlm.core import backend, disk, faults
from jaxlm.core.errors import (
    ANOTHER,
    FREE_SPACE,
    DataError,
    InUse,
    JaxlmError,
    SaveFailed,
    cannot_keep,
    listed,
)
from jaxlm.core.tree import leaves
from jaxlm.parallel.peers import Peers

# Suffixes of directories that a killed save or a killed removal leaves.
PARTIAL_SUFFIXES = (".orbax-checkpoint-tmp", ".retired")
SAVE_CHUNK_GB = 1  # chunk that a low-memory save copies to the host; a larger leaf is copied alone
LAYOUT = "layout"  # the part of a step that describes its arrays
NO_LIMIT_SECONDS = 30 * 24 * 3600  # Orbax requires a timeout


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreWriter:
    """The run that writes a store; by default one process alone, which nothing limits.

    Attributes:
      owner: fencing id of the process that writes.
      is_owner: returns whether the process still owns the run; called before each commit.
      peers: the processes of the run, which all save.
      rewind_steps: distance of a rewind in steps; a healthy step at least that old is kept.
      save_seconds: timeout from the end of `save` to the commit (`watch.save`); None disables it.
    """

    owner: str = ""
    is_owner: Callable[[], bool] = lambda: True
    peers: Peers = dataclasses.field(default_factory=Peers)
    rewind_steps: int = 0
    save_seconds: float | None = None


class Store:
    """The committed steps of one run.

    A step is an Orbax directory that contains `digests.json`. Both are written in the background
    and become visible by one rename. A directory without a valid record is no checkpoint; a damaged
    step is never removed, but its owner may move it to `quarantine/`.

    In a run of several processes each process writes its part of the arrays and hashes the files
    that it wrote. The first process collects the digests, writes the record, and creates, moves
    and removes directories.

    `ObjectStore` keeps the steps on an object store instead; `opened` chooses.

    Args:
      directory, config: parent directory of the steps, and which of them are kept.
      writer: the run that saves; None for this process alone.
      read_only: change nothing on the disk.
      low_memory: copy the state to host memory in parts during a save. The state must then not
        change until `wait` or `close` returns.
      verifier: compares a step with its record; None for this process alone, without progress.

    Raises SaveFailed if the disk is full, NotWritable if the directory is not writable.
    """

    is_packed = True  # the arrays of a process share files

    def __init__(
        self,
        directory: epath.PathLike,
        config: CheckpointConfig,
        *,
        writer: StoreWriter | None = None,
        read_only: bool = False,
        low_memory: bool = False,
        verifier: Verifier | None = None,
    ):
        self.local = epath.Path(directory).absolute()
        self.directory: Any = self._place(config)  # parent of the steps; not always local
        self._config, self._read_only = config, read_only
        self._writer, self.verifier = writer or StoreWriter(), verifier or Verifier()
        self._is_owner, self._peers = self._writer.is_owner, self._writer.peers
        self._is_first = self._peers.is_first
        self._save_seconds = math.ceil(self._writer.save_seconds or NO_LIMIT_SECONDS)
        self._pending: StepRecord | None = None  # the step that is being written
        # Digests of that step's files that this process wrote.
        self._own: records.FileDigests | None = None
        self._remover = concurrent.futures.ThreadPoolExecutor(1, "retired")
        self._removal: concurrent.futures.Future[None] | None = None
        # Errors that Orbax logs are raised here.
        absl_logging.set_verbosity(absl_logging.FATAL)
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        if not read_only:
            self._open()
        self._save_args: Any = ocp.args.PyTreeSave if low_memory else ocp.args.StandardSave
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(
                save_device_host_concurrent_gb=SAVE_CHUNK_GB, use_ocdbt=self.is_packed
            )
            if low_memory
            else ocp.StandardCheckpointHandler(use_ocdbt=self.is_packed),
            async_options=ocp.AsyncOptions(
                timeout_secs=self._save_seconds,
                barrier_sync_fn=self._sync,
                post_finalization_callback=self._complete,
            ),
            # Orbax would write its commit time after the record, into a file already hashed.
            checkpoint_metadata_store=ocp.metadata.metadata_store(enable_write=False),
        )
        self._barrier = ocp.multihost.get_barrier_sync_fn()

    @property
    def workdir(self) -> Path:
        """The directory of the run."""
        return Path(str(self.local.parent))

    @property
    def another(self) -> str:
        """The flags that name other places for a run and its checkpoints."""
        return ANOTHER

    @property
    def notices(self) -> list[str]:
        """Lines for the log about what was found when the store was opened."""
        return []

    def steps(self) -> list[int]:
        """Return the steps that have a directory, oldest first; they may be damaged."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdigit())

    def record(self, step: int) -> StepRecord:
        """Read a step's record. Raises DataError if it is missing, damaged or of another format."""
        return records.read(self._path(step))

    def written(self, step: int) -> float:
        """Return the time at which a step was committed, in seconds since 1970."""
        file = self._path(step) / records.NAME
        return float((file if file.exists() else self._path(step)).stat().mtime)

    def best(self) -> int | None:
        """Return the step with the lowest evaluation loss; None if no step was evaluated."""
        ranked = [(r.loss_nats, r.step) for r in self._records() if r.loss_nats is not None]
        return min(ranked)[1] if ranked else None

    def problems(self, step: int) -> list[str]:
        """Return the problems of a step's files, one a line; empty if every byte is as written."""
        try:
            return self.verifier.problems(self._path(step))
        except DataError as error:
            return [error.why]

    def latest_valid(
        self,
        note: Callable[[int, list[str]], object] = lambda *_: None,
        *,
        without: Container[int] = (),
    ) -> int | None:
        """Return the newest step whose every byte is as written; None if none was ever committed.

        Steps in `without` are skipped. `note` is called with each newer step that is damaged, and
        its problems. Nothing is moved. Raises DataError if there are steps and all are damaged, or
        one has another format.
        """
        damaged_steps: list[tuple[int, list[str]]] = []
        for step in (step for step in reversed(self.steps()) if step not in without):
            wrong = self._checked(step)
            if not wrong:
                for damaged, lines in damaged_steps:
                    note(damaged, lines)
                return step
            damaged_steps.append((step, wrong))
        if damaged_steps:
            raise DataError(
                f"all {len(damaged_steps)} checkpoints are damaged",
                where=str(self.directory),
                why=listed([f"step {step}: {lines[0]}" for step, lines in damaged_steps], 5),
                fix=self.another,
            )
        return None

    def quarantine(self, step: int, reason: str) -> epath.Path:
        """Rename a step into `quarantine/` and write the reason next to it; nothing is removed.

        Raises SaveFailed if the disk is full, NotWritable if the move fails otherwise.
        """
        folder = self.directory.parent / "quarantine"
        number = 1
        while (target := folder / (f"{step}" if number == 1 else f"{step}.{number}")).exists():
            number += 1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{target.name}.reason.txt").write_text(reason + "\n")
            disk.rename(self._path(step), target)
        except OSError as error:
            raise cannot_keep(folder.name, folder, error) from error
        return target

    def quarantined(self) -> list[tuple[str, str | None]]:
        """Return the path of each step in quarantine, and the reason if it is known."""
        rows: list[tuple[str, str | None]] = []
        for folder in sorted(p for p in self.workdir.glob("quarantine/*") if p.is_dir()):
            file = folder.with_name(f"{folder.name}.reason.txt")
            reason = file.read_text(errors="replace").strip() if file.exists() else None
            rows.append((str(folder), reason))
        return rows

    def save(
        self,
        step: int,
        state: Any,
        meta: dict[str, Any],
        *,
        loss_nats: float | None = None,
        healthy: bool = True,
    ) -> None:
        """Copy the state off the device, then write it in the background.

        When this returns, `state` may be donated; a low-memory store needs `wait` before that.
        Raises SaveFailed if an earlier save failed, or this save cannot begin.

        Args:
          state: a named tuple or dict of trees of arrays; parts that are None are not stored.
          step, meta, loss_nats, healthy: fields of the step's record.
        """
        self.wait()
        faults.point("save.begin", step)
        self._own = None
        self._pending = StepRecord(
            step=step,
            owner=self._writer.owner,
            loss_nats=None if loss_nats is None else float(loss_nats),
            healthy=healthy,
            meta=meta,
            files={},
        )
        try:
            self._orbax.save(self._staged(step), args=self._save_args(_parts(state)))
            faults.point("save.files", step)
        except Exception as error:  # Orbax and TensorStore raise errors of any type
            raise self._failed(error) from error

    def check(self) -> None:
        """Raise SaveFailed if a background save has failed."""
        try:
            self._orbax.check_for_errors()
        except Exception as error:  # Orbax re-raises any error of its thread
            raise self._failed(error) from error
        if self._removal is not None and self._removal.done():
            self._await_removal()

    def wait(self) -> None:
        """Wait until every save is committed and synced, and the steps it replaces are removed.

        Raises SaveFailed if one failed; InUse if another process owned the run at the commit.
        """
        try:
            self._orbax.wait_until_finished()
            if self._pending is not None and self._is_first:
                disk.sync(self.directory)  # Orbax renames the step but does not sync
        except Exception as error:
            raise self._failed(error) from error
        self._await_removal()

    def restore(self, step: int, abstract: Any) -> Any:
        """Restore the state of a step into the shapes, dtypes and shardings of `abstract`.

        Raises DataError if a leaf is missing, left over, or of another shape or dtype. Orbax would
        cast a dtype silently.
        """
        self._compare(step, _layout(abstract), self.layout(step))
        faults.point("restore.read", step)
        expected = ocp.args.StandardRestore(_parts(abstract))
        restored = self._orbax.restore(self._readable(step), args=expected)
        return abstract._replace(**restored) if hasattr(abstract, "_replace") else restored

    def restore_part(
        self, step: int, name: str, abstract: Any, left_out: tuple[str, ...] = ()
    ) -> Any:
        """Restore one part of the state, such as `params`. Raises DataError as `check_layout`."""
        expected = {name: abstract}
        self.check_layout(step, expected, left_out)
        restore_args = ocp.checkpoint_utils.construct_restore_args(expected)
        return self._read(step, expected, restore_args)[name]

    def check_layout(
        self, step: int, parts: Mapping[str, Any], left_out: tuple[str, ...] = ()
    ) -> None:
        """Raise DataError if parts of a step have other leaves, shapes or dtypes; read no array.

        Leaves that are not expected, and whose path in a part begins as one in `left_out`, may be
        in the step.
        """
        names = tuple(f"{name}/" for name in parts)
        unread = tuple(f"{name}{path}" for name in names for path in left_out)
        saved, expected = self.layout(step).items(), _layout(parts)
        saved_parts = {
            path: layout
            for path, layout in saved
            if path.startswith(names) and (path in expected or not path.startswith(unread))
        }
        self._compare(step, expected, saved_parts)

    def layout(self, step: int) -> dict[str, str]:
        """Return each leaf of a step's state by its path, as "float32[8, 4]"; read no array."""
        return _layout(self._metadata(step))

    def arrays(self, step: int) -> dict[str, np.ndarray]:
        """Return each leaf of a step's state by its path, whole, in host memory."""
        tree = self._metadata(step)
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return leaves(self._read(step, None, as_numpy))

    def leaf(self, step: int, path: str) -> np.ndarray:
        """Return one array of the parameters by its path, whole, in host memory; read no other."""
        args = ocp.RestoreArgs(restore_type=np.ndarray)
        return self._read_leaf(step, f"params/{path}", args, args)

    def restore_leaf(self, step: int, path: str, abstract: jax.ShapeDtypeStruct) -> jax.Array:
        """Return one array of the state on its sharding; read no other. See `check_layout`."""
        args = ocp.checkpoint_utils.construct_restore_args(abstract)
        return self._read_leaf(step, path, abstract, args)

    def _read_leaf(self, step: int, path: str, item: Any, args: Any) -> Any:
        for part in reversed(path.split("/")):
            item, args = {part: item}, {part: args}
        return next(iter(leaves(self._read(step, item, args)).values()))

    def _read(self, step: int, item: Any, restore_args: Any) -> Any:
        """Read the leaves of `item`, a part of a step; all if it is None."""
        args = ocp.args.PyTreeRestore(
            item=item, restore_args=restore_args, partial_restore=item is not None
        )
        reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        return reader.restore(self._readable(step, item and next(iter(item))), args=args)

    def _metadata(self, step: int) -> Any:
        return ocp.StandardCheckpointHandler().metadata(self._readable(step, LAYOUT)).tree

    def close(self) -> None:
        """Wait for the running save and removal. Raises SaveFailed if they failed."""
        self.wait()
        if self._is_first and not self._read_only:
            self._retire()
            self._await_removal()
        self._remover.shutdown()
        self._orbax.close()

    def release(self) -> None:
        """Close after an error: wait for the running save, ignore its result, remove its rest."""
        with contextlib.suppress(Exception):
            self._orbax.close()
        self._remover.shutdown()
        if self._is_first and not self._read_only:
            self.remove_torn()

    def remove_torn(self) -> None:
        """Remove what failed saves and killed processes left; ignore what cannot be removed.

        A writer holds the run directory's lock, so no other process writes; a process that lost the
        run removes nothing. The writers of a failed save may run on for a moment and create their
        folders again, hence the retries.
        """
        if not self._is_owner():
            return
        with contextlib.suppress(SaveFailed):
            self._await_removal()  # what it could not remove is tried again here
        for _ in range(10):
            with contextlib.suppress(OSError):
                is_partial = re.compile("|".join(map(re.escape, PARTIAL_SUFFIXES))).search
                torn = [path for path in self.directory.iterdir() if is_partial(path.name)]
                if not torn:
                    return
                for path in torn:
                    with contextlib.suppress(OSError):
                        path.rmtree()
            time.sleep(0.05)

    def _place(self, config: CheckpointConfig) -> Any:
        """Return the parent of the committed steps."""
        return self.local

    def _open(self) -> None:
        """Create the directory, try to create one inside: a later failure costs a compile."""
        if not self._is_first:
            return
        probe = self.directory / f"probe{PARTIAL_SUFFIXES[1]}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe.mkdir(exist_ok=True)
            probe.rmtree()
        except OSError as error:
            raise cannot_keep(self.directory.name, self.directory, error) from error
        self.remove_torn()

    def _path(self, step: int) -> Any:
        """Return the place of a committed step."""
        return self.directory / str(step)

    def _staged(self, step: int) -> epath.Path:
        """Return the local path that Orbax writes a step for."""
        return self.local / str(step)

    def _readable(self, step: int, part: str | None = None) -> epath.Path:
        """Return a local path with the files of a part of a step, LAYOUT alone, or all of them."""
        return self.local / str(step)

    def _torn(self, step: int) -> epath.Path:
        """Return the path at which Orbax writes a step before the commit."""
        return self._staged(step).with_name(f"{step}{PARTIAL_SUFFIXES[0]}")

    def _records(self) -> list[StepRecord]:
        valid = []
        for step in self.steps():
            with contextlib.suppress(DataError):
                valid.append(self.record(step))
        return valid

    def _checked(self, step: int) -> list[str]:
        """Return the problems of a step; raise UnsupportedFormat: such a step is not damaged."""
        faults.point("restore.verify", step)
        try:
            return self.verifier.problems(self._path(step))
        except records.UnsupportedFormat:
            raise
        except DataError as error:
            return [error.why]

    def _sync(self, *, key: str, timeout_ms: int) -> None:
        """Wait for the other processes. Orbax calls this in the background of a multi-process save.

        The first call comes when this process has written its files, the second at the commit.
        Before the first wait all processes hash their files at the same time.
        """
        begun = time.monotonic()
        if self._own is None:
            assert self._pending is not None
            index = jax.process_index()
            self._own = records.digests(
                self._torn(self._pending.step), lambda path: records.writer_process(path) == index
            )
            if not self._is_first:
                self._peers.gather("digests", self._own, self._save_seconds)
        self._wait_for_others(key, timeout_ms - int(1000 * (time.monotonic() - begun)))

    def _wait_for_others(self, key: str, timeout_ms: int) -> None:
        if timeout_ms <= 0:
            raise TimeoutError(f"no time is left to wait for {key}")
        self._barrier(key=key, timeout_ms=timeout_ms)

    def _complete(self) -> None:
        """Write the record of the step that Orbax is about to rename into place.

        Runs in the background, on one host. Old steps are retired here too, before the rename: the
        steps to keep are chosen among committed ones, so that a crash at any instant leaves all
        that the config keeps. Here they are only renamed, and a thread of its own removes them,
        as Orbax's timeout is running. A process that was suspended meanwhile may have lost the run:
        its ownership is checked before the first removal, and last.
        """
        assert self._pending is not None
        step = self._pending.step
        torn = self._torn(step)
        faults.point("save.digest", step)
        if self._peers.count == 1:
            files = records.digests(torn)
        else:
            parts = self._peers.gather("digests", self._own, self._save_seconds)
            files = records.merge_digests(torn, parts)
        records.write(torn, dataclasses.replace(self._pending, files=files))
        backend.release_freed_memory()  # the buffers that the files were written from
        self._refuse_if_lost(step)
        self._retire()
        faults.point("save.commit", step)
        self._refuse_if_lost(step)

    def _refuse_if_lost(self, step: int) -> None:
        """Raise InUse if this process does not own the run anymore."""
        if not self._is_owner():
            why = f"step {step} was not committed"
            fix = self.another
            where = str(self.directory)
            raise InUse("another process has taken over this run", where=where, why=why, fix=fix)

    def _retire(self) -> None:
        """Start removing the steps that need not be kept; damaged ones wait for the quarantine."""
        committed = self._records()
        if not committed:
            return
        keep = records.retained_steps(
            committed, self._config, rewind_steps=self._writer.rewind_steps
        )
        self._discard({record.step for record in committed} - keep)

    def _discard(self, steps: set[int]) -> None:
        """Start removing steps: from now on they are no checkpoints."""
        every = []
        for step in steps:
            retired = self._path(step).with_name(f"{step}{PARTIAL_SUFFIXES[1]}")
            disk.rename(self._path(step), retired)
            every.append(retired)
            faults.point("save.retire", step)
        if every:
            self._removal = self._remover.submit(_remove, every)

    def _await_removal(self) -> None:
        """Wait for the removal of old steps. Raise SaveFailed if a step cannot be removed."""
        removal, self._removal = self._removal, None
        try:
            if removal is not None:
                removal.result()
        except OSError as error:
            raise SaveFailed(
                "an old checkpoint could not be removed",
                where=str(self.directory),
                why=f"{type(error).__name__}: {error}",
                fix=f"rm -r {shlex.quote(str(self.directory))}/*{PARTIAL_SUFFIXES[1]}",
            ) from error
        except JaxlmError as error:  # of an object store
            raise SaveFailed(
                "an old checkpoint could not be removed",
                where=error.where,
                why=f"{error.what}: {error.why}",
                fix="the same command again, which removes the rest of it",
            ) from error

    def _compare(self, step: int, expected: dict[str, str], saved: dict[str, str]) -> None:
        differences = [
            f"{path}: want {expected.get(path, 'nothing')}, found {saved.get(path, 'nothing')}"
            for path in sorted(expected | saved)
            if expected.get(path) != saved.get(path)
        ]
        if not differences:
            return
        more = f"\nand {len(differences) - 3} more" if len(differences) > 3 else ""
        where, why = str(self._path(step)), "\n".join(differences[:3]) + more
        fix = self.another
        # Another version of jaxlm may store the optimizer's state in another form.
        if all(line.startswith("opt_state/") for line in differences):
            what = f"checkpoint {step} has another optimizer state, in {len(differences)} leaves"
            reset = "--reset_optimizer    # keeps the parameters, resets the optimizer's state"
            fix = f"{reset}\n{fix}"
            raise DataError(what, where=where, why=why, fix=fix)
        what = f"checkpoint {step} does not match the model in {len(differences)} leaves"
        raise DataError(what, where=where, why=why, fix=fix)

    def _failed(self, error: BaseException) -> SaveFailed | InUse:
        if isinstance(error, InUse):
            return error
        if isinstance(error, JaxlmError):  # of an object store
            return SaveFailed(
                "a checkpoint could not be written",
                where=error.where,
                why=f"{error.what}: {error.why}",
                fix="the same command again, once the store accepts it: training resumes at the "
                "last committed step",
            )
        where = str(self.directory)
        if isinstance(error, TimeoutError) and error.errno is None:  # not of the file system
            what = f"a checkpoint was not committed within {self._save_seconds} s"
            fix = f"--config.watch.save={2 * self._save_seconds}s    # if the disk is that slow"
            return SaveFailed(what, where=where, why=f"that is watch.save: {error}", fix=fix)
        return SaveFailed(
            "a checkpoint could not be written",
            where=where,
            why=f"{type(error).__name__}: {error}",  # may end with the actual cause
            fix=f"{FREE_SPACE}: training resumes at the last committed step",
        )


def _remove(folders: Sequence[epath.Path]) -> None:
    for folder in folders:
        folder.rmtree()


def _parts(state: Any) -> Any:
    """Return the parts of a state by name, without absent ones, which Orbax would ask for again."""
    if not hasattr(state, "_asdict"):
        return state
    return {name: part for name, part in state._asdict().items() if part is not None}


def _layout(tree: Any) -> dict[str, str]:
    """Return each leaf's path, dtype and shape, the same for named tuples and for dicts."""
    return {
        path: f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in leaves(tree).items()
    }
