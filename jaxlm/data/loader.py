"""Batches as a pure function of (seed, step)."""

import dataclasses
import functools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxlm.core.batch_schedule import BatchSchedule, Phase
from jaxlm.core.errors import DataError, JaxlmError
from jaxlm.data import damage
from jaxlm.data.batch import Tokens
from jaxlm.data.corrupt.rows import AnyCorruption, Key
from jaxlm.data.joined import AnyShards
from jaxlm.data.packing import Plan
from jaxlm.data.shards import Damaged

# Rows cut into shorter ones, for the first stages of a run.


def cut(batch: Tokens, length: int) -> Tokens:
    """Each row [T] of a host's batch as T / length rows, in order; no token is lost, and a document goes on in the next.

    What a row begins with is its segment 1, at position 0: as if the row had been packed with that length. For rows as causal
    and mtp read them: of those that another objective has changed, a piece would lack what the rest tells, such as the span
    that belongs to a sentinel.
    """
    tokens, targets, weights, segments, positions = (
        np.asarray(field).reshape(-1, length) for field in batch[:5]
    )
    first = segments[:, :1]
    goes_on = segments == first
    positions = np.where(goes_on & (segments > 0), positions - positions[:, :1], positions)
    segments = np.where(segments > 0, segments - first + 1, 0).astype(np.int32)
    return Tokens(tokens, targets, weights, segments, positions.astype(np.int32))  # type: ignore[arg-type]


DRAWN = (0,)  # the shuffle of the rows of a partial evaluation
ROUNDS = 4  # of the index permutation's Feistel network


class WorkerLost(JaxlmError):
    """A process that reads data ended by itself."""

    kind = "data worker lost"


@dataclasses.dataclass(frozen=True)
class Loader:
    """The rows of one shard set.

    Args:
      most_lost: the share of the set's tokens that may weigh nothing because they cannot be read; None ends with the first.
      corruption: what an objective makes of each row, by the row and its epoch; None leaves rows as they are.

    The global batch at a step is a slice of an endless stream of rows: each epoch is all rows, permuted by an O(1)
    function of the seed and the epoch. So the cursor is the step, going to any step costs nothing, and any number of
    hosts reads the same stream, each its own rows of every batch.
    """

    shards: AnyShards
    plan: Plan
    sequence: int
    seed: int
    workers: int = 0
    prefetch: int = 8
    most_lost: float | None = None
    corruption: AnyCorruption | None = None

    def batches(
        self,
        start: int,
        *,
        batch: int | BatchSchedule,
        rows: slice | Mapping[int, slice] | None = None,
        skips: Sequence[tuple[int, int]] = (),
        warn: Callable[[str], None] = lambda _: None,
    ) -> Iterator[Tokens]:
        """The host's rows of the global batches from step `start` on, without end; read ahead by Grain.

        Where batches differ in size, `rows` has the host's rows of each size. `skips` are ranges of batches, by their number
        in the stream, that are left out. `warn` is told what of the rows cannot be read.

        Raises:
          DataError: where there are fewer rows than a batch takes; from the iterator, where a shard is damaged.
          WorkerLost: from the iterator, where a worker process died.
        """
        pace = batch if isinstance(batch, BatchSchedule) else constant(batch, self.sequence)
        sizes = [stage.rows for stage in pace.phases]
        if self.plan.rows < max(sizes):
            raise self._too_short(max(sizes))
        import grain

        own = (
            {size: slice(0, size) if rows is None else rows for size in sizes}
            if rows is None or isinstance(rows, slice)
            else dict(rows)
        )
        steps = grain.MapDataset.source(_Steps(self, pace, own, tuple(skips)))[start:]
        options = grain.ReadOptions(
            num_threads=min(4, self.prefetch), prefetch_buffer_size=self.prefetch
        )
        dataset = steps.to_iter_dataset(options)
        if self.workers:
            from absl import flags

            flags.FLAGS.mark_as_parsed()  # Grain's workers read absl flags, which nobody parses here
            # Batches come through a pipe: shared memory is 64 MB in many containers, and is left behind by a killed worker.
            dataset = grain.experimental.WithOptionsIterDataset(
                dataset, grain.experimental.DatasetOptions(min_shm_size=2**62)
            ).mp_prefetch(
                grain.MultiprocessingOptions(
                    num_workers=self.workers, per_worker_buffer_size=self.prefetch
                ),
                worker_init_fn=_end_with_parent,
            )
        stream = _closing(iter(dataset))
        if self.most_lost is None:
            return stream
        read = (
            (each, functools.partial(self._losses_at, number(step, skips), pace, own))
            for step, each in enumerate(stream, start)
        )
        return damage.told(read, self.shards.manifest.tokens, self.most_lost, warn)

    def at(self, step: int, *, batch: int | BatchSchedule, rows: slice) -> Tokens:
        """The given rows of the global batch at `step`, uncut."""
        first = _first(step, batch)
        return self._stack(self.keys(first + rows.start, first + rows.stop))

    def keys(self, start: int, stop: int) -> list[Key]:
        """Where the rows of the stream from `start` up to `stop` are read."""
        size = self.plan.rows
        numbers = (divmod(number, size) for number in range(start, stop))
        return [
            Key(self.seed, epoch, shuffled(index, size, [self.seed, epoch]))
            for epoch, index in numbers
        ]

    def evaluation(
        self, *, batch: int, rows: slice | None = None, limit: int | None = None
    ) -> Iterator[Tokens]:
        """Yield every row once, in the plan's order, or `limit` batches of rows that are drawn.

        Rows are drawn without replacement by one fixed shuffle: the same at every evaluation and
        in every run, on any number of hosts, and the first n of them whatever the batch. The plan
        would have the rows of long documents first. Rows are changed as in the first epoch. The
        last batch of all rows is filled up with rows of weight 0.
        """
        count = self.evaluated(batch=batch, limit=limit)
        is_drawn = count < self.plan.rows
        rows = rows or slice(0, batch)

        def key(number: int) -> Key | None:
            if number >= count:
                return None
            row = shuffled(number, self.plan.rows, DRAWN) if is_drawn else number
            return Key(self.seed, 0, row)

        for start in range(0, count, batch):
            yield self._stack([key(start + n) for n in range(rows.start, rows.stop)])

    def evaluated(self, *, batch: int, limit: int | None) -> int:
        """Return how many rows an `evaluation` reads."""
        return self.plan.rows if limit is None else min(limit * batch, self.plan.rows)

    def origins(self, step: int, *, batch: int | BatchSchedule) -> list[list[tuple[str, int]]]:
        """For each row of the global batch at `step`, uncut, the (file, record) of its documents."""
        return [
            [self.shards.origin(int(d)) for d in self.plan.pieces(key.row)["document"]]
            for key in self.keys(_first(step, batch), _first(step + 1, batch))
        ]

    def epochs(self, rows: int) -> float:
        """How often so many rows of the stream are every row."""
        return rows / self.plan.rows

    def _too_short(self, batch: int) -> DataError:
        rows, manifest = self.plan.rows, self.shards.manifest
        shorter = (manifest.tokens - manifest.documents) // batch
        return DataError(
            "the training data is shorter than one batch",
            where=str(self.shards.folder),
            why=f"{manifest.tokens} tokens are {rows} row{'s' if rows > 1 else ''} of {self.sequence}, a batch takes {batch}",
            fix=f"--config.train.batch={rows}\n"
            + (f"--config.data.sequence={shorter}\n" if shorter else "")
            + "name more files",
        )

    def _losses_at(
        self, step: int, pace: BatchSchedule, own: Mapping[int, slice]
    ) -> Iterator[damage.Loss]:
        """What of the host's rows of the global batch at `step` cannot be read."""
        rows, first = own[pace.phase(step).rows], pace.rows(step)
        for key in self.keys(first + rows.start, first + rows.stop):
            for piece in self.plan.pieces(key.row).tolist():
                document, start, length = piece
                try:
                    self.shards.read(document, start, start + length + 1)
                except Damaged as error:
                    yield piece, error

    def _stack(self, keys: Sequence[Key | None]) -> Tokens:
        shape = (len(keys), self.sequence)
        tokens, targets, segments, positions = (np.zeros(shape, np.int32) for _ in range(4))
        weights = np.zeros(shape, np.float32)
        for row, key in enumerate(keys):
            slot = 0
            for segment, (document, start, length) in enumerate(
                () if key is None else self.plan.pieces(key.row), 1
            ):
                here = (row, slice(slot, slot + length))
                segments[here], positions[here] = segment, np.arange(length)
                try:
                    ids = self.shards.read(document, start, start + length + 1)
                    tokens[here], targets[here], weights[here] = ids[:-1], ids[1:], 1
                except Damaged:
                    if self.most_lost is None:
                        raise
                slot += length
        # NumPy until it is placed on devices: the one place where a batch holds anything but JAX arrays.
        batch = Tokens(tokens, targets, weights, segments, positions)  # type: ignore[arg-type]
        return batch if self.corruption is None else _corrupted(batch, keys, self.corruption)


def shuffled(index: int, size: int, seed: Sequence[int]) -> int:
    """Where a permutation of `size` rows has its row `index`; in time that does not grow with the size."""
    from grain.experimental import index_shuffle

    if size == 1:
        return 0
    return index_shuffle(index, max_index=size - 1, seed=_drawn(*seed), rounds=ROUNDS)


@functools.lru_cache(1024)
def _drawn(*seed: int) -> int:
    return int(np.random.default_rng(seed).integers(2**31))


def _corrupted(batch: Tokens, keys: Sequence[Key | None], corruption: AnyCorruption) -> Tokens:
    """The rows changed, each by its key; those without one are empty."""
    fields = [each for each in batch if each is not None]
    rows = [Tokens(*(field[number] for field in fields)) for number in range(len(keys))]
    changed = [corruption(row, key or Key(0, 0, 0)) for row, key in zip(rows, keys, strict=True)]
    columns = zip(*changed, strict=True)
    stacked = Tokens(*(None if each[0] is None else np.stack(each) for each in columns))  # type: ignore[arg-type]
    return stacked._replace(
        visible_until=stacked.visible_until if corruption.both_ways else None,
        block_positions=stacked.block_positions if corruption.has_inner else None,
        predicts_ahead=stacked.predicts_ahead if corruption.has_ahead else None,
    )


def _end_with_parent(number: int, count: int) -> None:
    """A worker whose run was killed ends with it: Grain's would wait for ever for somebody to take its batches."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _closing(batches: Any) -> Iterator[Tokens]:
    """The batches of a Grain iterator, which is closed whatever ends them: its workers must not outlive it."""
    try:
        while True:
            try:
                batch = next(batches)
            except RuntimeError as error:
                if "exit code" not in str(error):
                    raise
                raise WorkerLost(
                    "a process that reads data died",
                    where="data.workers",
                    why=str(error).partition(". ")[0],
                    fix="--config.data.workers=0    # reads in threads of this process",
                ) from error
            yield batch
    finally:
        batches.close()


def number(step: int, skips: Sequence[tuple[int, int]]) -> int:
    """The number, in the whole stream, of the batch that a step reads when the ranges `skips` [low, high) are left out."""
    for low, high in sorted(skips):
        if step >= low:
            step += high - low
    return step


def constant(batch: int, sequence: int) -> BatchSchedule:
    """Batches of one size."""
    return BatchSchedule((Phase(0, batch, sequence),), sequence)


def _first(number: int, batch: int | BatchSchedule) -> int:
    """The first row of the stream that a batch takes."""
    return batch.rows(number) if isinstance(batch, BatchSchedule) else number * batch


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The global batches as a sequence that Grain can index. Endless, but a sequence has a length."""

    loader: Loader
    pace: BatchSchedule
    own: dict[int, slice]
    skips: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return 2**40

    def __getitem__(self, step: int) -> Tokens:
        batch = number(step, self.skips)
        stage = self.pace.phase(batch)
        rows = self.loader.at(batch, batch=self.pace, rows=self.own[stage.rows])
        return rows if stage.length == self.loader.sequence else cut(rows, stage.length)
