"""Orbax behind our own door: a tree of arrays and JSON, committed a step at a time."""

import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import shlex
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from etils import epath

from jaxlm.checkpoint import record as records
from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.record import Record
from jaxlm.checkpoint.retention import kept
from jaxlm.checkpoint.verify import Verifier
from jaxlm.core import disk, faults
from jaxlm.core.errors import DataError, InUse, SaveFailed, cannot_keep, listed
from jaxlm.core.tree import leaves
from jaxlm.parallel.peers import Peers

PARTIAL_SUFFIXES = (
    ".orbax-checkpoint-tmp",
    ".retired",
)  # what a killed save, or a killed removal, leaves
AT_ONCE_GB = 1  # of a frugal save; a leaf that is larger goes alone
NO_LIMIT_SECONDS = 30 * 24 * 3600  # Orbax wants a limit


class Store:
    """The committed steps of one run.

    A step is a directory of Orbax with `digests.json` in it. Both are written in the background and become visible by
    one rename. A directory without a valid record is no checkpoint; a damaged one is never removed, and its owner may
    move it to `quarantine/`.

    If a run has several processes, each writes its part of the arrays and hashes the files that it wrote. The first one
    collects the digests, writes the record, and makes, moves and removes directories.

    Args:
      directory: where the steps are.
      config: what is kept.
      reach: how many steps a rewind goes back; a healthy step at least as old is kept.
      owner: fencing id of the process that writes.
      is_owner: whether it still owns the run; asked before each commit.
      read_only: touch nothing.
      is_frugal: whether a save copies no more than a part of the state to host memory at a time, and reads the rest later:
        for one that nobody changes until the store is closed.
      peers: the processes of the run, all of which save; None for this one alone.
      save_seconds: the limit of a save from the end of `save` to the commit, `watch.save`; None for no limit.
      verifier: compares a step with its record; None for this process alone, without progress lines.

    Raises:
      SaveFailed: where the disk is full.
      NotWritable: where the directory cannot be made, or nothing can be made in it, for another reason.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        config: CheckpointConfig,
        *,
        reach: int = 0,
        owner: str = "",
        is_owner: Callable[[], bool] = lambda: True,
        read_only: bool = False,
        is_frugal: bool = False,
        peers: Peers | None = None,
        save_seconds: float | None = None,
        verifier: Verifier | None = None,
    ):
        self.directory = epath.Path(directory).absolute()
        self._config, self._reach, self._read_only = config, reach, read_only
        self._owner, self._is_owner = owner, is_owner
        self.verifier = verifier or Verifier()
        self._peers = peers or Peers()
        self._is_first = is_first = self._peers.is_first
        self._save_seconds = math.ceil(save_seconds or NO_LIMIT_SECONDS)
        self._pending: Record | None = None  # the step that is being written
        # Digests of the files of that step that this process wrote.
        self._own: dict[str, tuple[int, str]] | None = None
        self._remover = concurrent.futures.ThreadPoolExecutor(1, "retired")
        self._removal: concurrent.futures.Future[None] | None = None
        # What they log, we raise.
        absl_logging.set_verbosity(absl_logging.FATAL)
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        if not read_only and is_first:
            self._open()
        self._save_args: Any = ocp.args.PyTreeSave if is_frugal else ocp.args.StandardSave
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(save_device_host_concurrent_gb=AT_ONCE_GB)
            if is_frugal
            else ocp.StandardCheckpointHandler(),
            async_options=ocp.AsyncOptions(
                timeout_secs=self._save_seconds,
                barrier_sync_fn=self._sync,
                post_finalization_callback=self._complete,
            ),
            # Orbax would write its time of commit after the record, into a file that has a digest by then.
            checkpoint_metadata_store=ocp.metadata.metadata_store(enable_write=False),
        )
        self._barrier = ocp.multihost.get_barrier_sync_fn()

    def steps(self) -> list[int]:
        """Steps that have a directory, oldest first; whether they are sound is for `newest_sound` to say."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdigit())

    def record(self, step: int) -> Record:
        """What is known of a step. Raises DataError where its record is missing, damaged or of another format."""
        return records.read(self._path(step))

    def best(self) -> int | None:
        """The step with the lowest evaluation loss; None where no step was evaluated."""
        ranked = [(r.loss_nats, r.step) for r in self._records() if r.loss_nats is not None]
        return min(ranked)[1] if ranked else None

    def problems(self, step: int) -> list[str]:
        """What is wrong with a step's files, a line each; empty where every byte is as it was written."""
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
        """The newest step, but for some, whose every byte is as it was written; None where none was ever committed.

        `note` gets each newer step that is damaged, with what is wrong with it. Nothing is moved.

        Raises:
          DataError: where there are steps and all are damaged, or one is of another format.
        """
        found: list[tuple[int, list[str]]] = []
        for step in reversed(self.steps()):
            if step in without:
                continue
            wrong = self._checked(step)
            if not wrong:
                for damaged, lines in found:
                    note(damaged, lines)
                return step
            found.append((step, wrong))
        if found:
            raise DataError(
                f"all {len(found)} checkpoints are damaged",
                where=str(self.directory),
                why=listed([f"step {step}: {lines[0]}" for step, lines in found], 5),
                fix="--workdir=runs/another",
            )
        return None

    def quarantine(self, step: int, reason: str) -> epath.Path:
        """Moves a step out of the way by a rename, the reason beside it; nothing is removed.

        Raises:
          SaveFailed: where the disk is full.
          NotWritable: where it cannot be moved for another reason.
        """
        folder = self.directory.parent / "quarantine"
        number = 1
        while (place := folder / (f"{step}" if number == 1 else f"{step}.{number}")).exists():
            number += 1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{place.name}.reason.txt").write_text(reason + "\n")
            disk.rename(self._path(step), place)
        except OSError as error:
            raise cannot_keep(folder.name, folder, error) from error
        return place

    def save(
        self,
        step: int,
        state: Any,
        meta: dict[str, Any],
        *,
        loss_nats: float | None = None,
        healthy: bool = True,
    ) -> None:
        """Copies the state off the device, then writes in the background.

        Returns once `state` may be donated; not before `wait` has returned where the store is frugal.

        Raises:
          SaveFailed: where an earlier save turned out to have failed, or this one cannot begin.
        """
        self.wait()
        faults.point("save.begin", step)
        self._own = None
        self._pending = Record(
            step=step,
            owner=self._owner,
            loss_nats=None if loss_nats is None else float(loss_nats),
            healthy=healthy,
            meta=meta,
            files={},
        )
        try:
            self._orbax.save(self._path(step), args=self._save_args(_parts(state)))
            faults.point("save.files", step)
        except Exception as error:  # Orbax and its array store raise what they like
            raise self._failed(error) from error

    def check(self) -> None:
        """Raises SaveFailed where a save in the background has failed."""
        try:
            self._orbax.check_for_errors()
        except Exception as error:  # Orbax passes on whatever its thread raised
            raise self._failed(error) from error
        if self._removal is not None and self._removal.done():
            self._await_removal()

    def wait(self) -> None:
        """Returns when every save so far is committed, on the disk too, and older steps that went for it are gone.

        Raises:
          SaveFailed: if a save or a removal failed.
          InUse: if another process owned the run when the save was to be committed.
        """
        try:
            self._orbax.wait_until_finished()
            if self._pending is not None and self._is_first:
                disk.sync(self.directory)  # Orbax gives the step its name, and leaves it at that
        except Exception as error:
            raise self._failed(error) from error
        self._await_removal()

    def restore(self, step: int, abstract: Any) -> Any:
        """The state of a step, straight into the shapes, dtypes and shardings of `abstract`.

        Raises:
          DataError: where a leaf is missing, left over, or of another shape or dtype. Orbax would cast a dtype silently.
        """
        self._compare(step, _layout(abstract), self.layout(step))
        faults.point("restore.read", step)
        wanted = ocp.args.StandardRestore(_parts(abstract))
        restored = self._orbax.restore(self._path(step), args=wanted)
        return abstract._replace(**restored) if hasattr(abstract, "_replace") else restored

    def restore_part(self, step: int, name: str, abstract: Any) -> Any:
        """One part of the state, such as `params`, without reading the others. Raises DataError as `restore` does."""
        wanted = {name: abstract}
        self.check_layout(step, wanted)
        args = ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        )
        reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        return reader.restore(self._path(step), args=args)[name]

    def check_layout(self, step: int, parts: Mapping[str, Any]) -> None:
        """Raises DataError where these parts of a step's state have other leaves, shapes or dtypes; no array is read."""
        names = tuple(f"{name}/" for name in parts)
        saved = self.layout(step).items()
        found = {path: layout for path, layout in saved if path.startswith(names)}
        self._compare(step, _layout(parts), found)

    def layout(self, step: int) -> dict[str, str]:
        """Each leaf of a step's state by its path, as "float32[8, 4]"; no array is read."""
        return _layout(ocp.StandardCheckpointHandler().metadata(self._path(step)).tree)

    def arrays(self, step: int) -> dict[str, np.ndarray]:
        """Each leaf of a step's state by its path, whole, in host memory."""
        path = self._path(step)
        tree = ocp.StandardCheckpointHandler().metadata(path).tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        return leaves(reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy)))

    def leaf(self, step: int, path: str) -> np.ndarray:
        """One array of the parameters by its path, whole, in host memory; no other is read."""
        item: Any = ocp.RestoreArgs(restore_type=np.ndarray)
        for part in reversed(["params", *path.split("/")]):
            item = {part: item}
        args = ocp.args.PyTreeRestore(item=item, restore_args=item, partial_restore=True)
        reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        return next(iter(leaves(reader.restore(self._path(step), args=args)).values()))

    def close(self) -> None:
        """Waits for what is being written; raises SaveFailed where it failed."""
        self.wait()
        if self._is_first and not self._read_only:
            self._retire()
            self._await_removal()
        self._remover.shutdown()
        self._orbax.close()

    def release(self) -> None:
        """Lets go after an error: waits for what is being written, says nothing of how it went, removes what it left."""
        with contextlib.suppress(Exception):
            self._orbax.close()
        self._remover.shutdown()
        if self._is_first and not self._read_only:
            self.remove_torn()

    def remove_torn(self) -> None:
        """Removes what a failed save, or a killed process, left half-done; what cannot be removed stays until the next time.

        Whoever may write holds the run directory's lock, so nobody else is writing; who has lost it removes nothing. But
        the writers of a save that failed may still be at it for a moment, and make their folders again.
        """
        if not self._is_owner():
            return
        with contextlib.suppress(SaveFailed):
            self._await_removal()  # what it could not remove is tried again here
        for _ in range(10):
            with contextlib.suppress(OSError):
                every = self.directory.iterdir()
                torn = [
                    path
                    for path in every
                    if any(suffix in path.name for suffix in PARTIAL_SUFFIXES)
                ]
                if not torn:
                    return
                for path in torn:
                    with contextlib.suppress(OSError):
                        path.rmtree()
            time.sleep(0.05)

    def _open(self) -> None:
        """Makes the directory. That something can be made in it is tried: at the first save it would cost a compile."""
        probe = self.directory / f"probe{PARTIAL_SUFFIXES[1]}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe.mkdir(exist_ok=True)
            probe.rmtree()
        except OSError as error:
            raise cannot_keep(self.directory.name, self.directory, error) from error
        self.remove_torn()

    def _path(self, step: int) -> epath.Path:
        return self.directory / str(step)

    def _torn(self, step: int) -> epath.Path:
        """Where Orbax writes a step before the commit."""
        return self._path(step).with_name(f"{step}{PARTIAL_SUFFIXES[0]}")

    def _records(self) -> list[Record]:
        found = []
        for step in self.steps():
            with contextlib.suppress(DataError):
                found.append(self.record(step))
        return found

    def _checked(self, step: int) -> list[str]:
        """What is wrong with a step; a step of another format is not damaged, and stops us."""
        faults.point("restore.verify", step)
        try:
            return self.verifier.problems(self._path(step))
        except records.OtherFormat:
            raise
        except DataError as error:
            return [error.why]

    def _sync(self, *, key: str, timeout_ms: int) -> None:
        """Wait for the other processes, as Orbax asks in the background, with several processes only.

        It asks first when this process has written its files, and once more for the commit. The first time the files are
        hashed before, by all processes at once.
        """
        begun = time.monotonic()
        if self._own is None:
            assert self._pending is not None
            index = jax.process_index()
            self._own = records.digests(
                self._torn(self._pending.step), lambda path: records.writer(path) == index
            )
            if not self._is_first:
                self._peers.gather("digests", self._own, self._save_seconds)
        left = timeout_ms - int(1000 * (time.monotonic() - begun))
        if left <= 0:
            raise TimeoutError(f"no time is left to wait for {key}")
        self._barrier(key=key, timeout_ms=left)

    def _complete(self) -> None:
        """Write the record of the step that Orbax is about to rename into place. Runs in the background, on one host.

        Steps go here too, before the rename: what is kept is chosen among those that are committed, so the death of this
        process at any instant leaves all that the config asks for. They get another name here and are removed in a thread
        of their own, as Orbax's limit of a save is running. A process that was stopped meanwhile may have lost the run to
        another: it is asked before the first removal, and last.
        """
        assert self._pending is not None
        step = self._pending.step
        torn = self._torn(step)
        faults.point("save.digest", step)
        if self._peers.count == 1:
            files = records.digests(torn)
        else:
            parts = self._peers.gather("digests", self._own, self._save_seconds)
            files = records.merged(torn, parts)
        records.write(torn, dataclasses.replace(self._pending, files=files))
        self._refuse_if_lost(step)
        self._retire()
        faults.point("save.commit", step)
        self._refuse_if_lost(step)

    def _refuse_if_lost(self, step: int) -> None:
        """Raises InUse where this process owns the run no longer."""
        if not self._is_owner():
            raise InUse(
                "another process has taken this run over",
                where=str(self.directory),
                why=f"step {step} was not committed",
                fix="--workdir=runs/another",
            )

    def _retire(self) -> None:
        """Begin to remove the steps that need not be kept. Damaged ones are left for the quarantine."""
        found = self._records()
        if not found:
            return
        keep = kept(found, self._config, reach=self._reach)
        every = []
        for step in {record.step for record in found} - keep:
            retired = self._path(step).with_name(f"{step}{PARTIAL_SUFFIXES[1]}")
            disk.rename(self._path(step), retired)
            every.append(retired)
            faults.point("save.retire", step)
        if every:
            self._removal = self._remover.submit(_remove, every)

    def _await_removal(self) -> None:
        """Return when steps that need not be kept are gone. Raise SaveFailed if one cannot be removed."""
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

    def _compare(self, step: int, wanted: dict[str, str], found: dict[str, str]) -> None:
        differences = [
            f"{path}: want {wanted.get(path, 'nothing')}, found {found.get(path, 'nothing')}"
            for path in sorted(wanted | found)
            if wanted.get(path) != found.get(path)
        ]
        if not differences:
            return
        more = f"\nand {len(differences) - 3} more" if len(differences) > 3 else ""
        why = "\n".join(differences[:3]) + more
        # An optimizer may keep its state in another form than the jaxlm that saved it.
        if all(line.startswith("opt_state/") for line in differences):
            raise DataError(
                f"checkpoint {step} holds the state of the optimizer in another form, in {len(differences)} leaves",
                where=str(self._path(step)),
                why=why,
                fix="--reset_optimizer    # keeps the parameters, and begins the optimizer's state anew\n--workdir=runs/another",
            )
        raise DataError(
            f"checkpoint {step} does not match the model in {len(differences)} leaves",
            where=str(self._path(step)),
            why=why,
            fix="--workdir=runs/another",
        )

    def _failed(self, error: BaseException) -> SaveFailed | InUse:
        if isinstance(error, InUse):
            return error
        if isinstance(error, TimeoutError) and error.errno is None:  # not one of the file system
            return SaveFailed(
                f"a checkpoint was not committed within {self._save_seconds} s",
                where=str(self.directory),
                why=f"that is watch.save: {error}",
                fix=f"--config.watch.save={2 * self._save_seconds}s    # if the disk is that slow",
            )
        return SaveFailed(
            "a checkpoint could not be written",
            where=str(self.directory),
            why=f"{type(error).__name__}: {error}",  # its cause may be the last words of many
            fix="free space there, then run the same command again: it goes on from the last committed step",
        )


def _remove(folders: Sequence[epath.Path]) -> None:
    for folder in folders:
        folder.rmtree()


def _parts(state: Any) -> Any:
    """The parts of a state by name, without those that it has not: Orbax would store that one is missing, and ask for it."""
    if not hasattr(state, "_asdict"):
        return state
    return {name: part for name, part in state._asdict().items() if part is not None}


def _layout(tree: Any) -> dict[str, str]:
    """Each leaf's path, dtype and shape; named tuples and dicts of the same names read the same."""
    return {
        path: f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in leaves(tree).items()
    }
