"""Batches as a pure function of (seed, step)."""

import dataclasses
import functools
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxlm.core.batch_schedule import BatchSchedule, Phase
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import DataError, JaxlmError
from jaxlm.data.batch import Answers, Rollout, TeacherTop, Tokens
from jaxlm.data.corrupt.rows import RowChange, RowKey
from jaxlm.data.packing import PackingPlan
from jaxlm.data.shards import AnyShards, DamagedShard
from jaxlm.data.teacher import COLUMNS, StoredTeacher

Piece = tuple[int, int, int]  # (document, first id, number of ids)
LostPiece = tuple[Piece, DamagedShard]  # that cannot be read, and the error
Gather = Callable[[Any], list[Any]]  # of a value of each process on the first one, via JSON

EVALUATION_SEED = (0,)  # seed of the row shuffle of a partial evaluation
ANSWERS_MULTIPLE = 32  # devices that may split a row
ROUNDS = 4  # rounds of the Feistel network of the index permutation


class WorkerLost(JaxlmError):
    """A data worker process died."""

    kind = "data worker lost"


@dataclasses.dataclass(frozen=True)
class Loader:
    """The rows of one shard set, as an endless shuffled stream.

    The global batch of a step is a slice of the stream: each epoch is all rows, permuted by an O(1)
    function of seed and epoch. The cursor is the step, so seeking is free, and any number of hosts
    reads the same stream, each its own rows of every batch.
    """

    shards: AnyShards
    plan: PackingPlan
    sequence: int
    seed: int  # of the order of rows and of the corruption
    workers: int = 0  # processes that read; 0 reads in threads
    prefetch: int = 8  # batches that are read ahead
    max_lost: float | None = None  # share of the tokens that may be unreadable, with weight 0
    corruption: RowChange | None = None  # the objective's change of each row, by row and epoch
    # Log-probability of each document under a reference, float32, for data of judged answers.
    reference: np.ndarray | None = None
    # Distributions of a teacher behind each id, for distillation without the teacher.
    teacher: StoredTeacher | None = None

    @property
    def predicts_all(self) -> bool:
        """If each token is predicted from those before it: not for parts of conversations."""
        return self.corruption is None and not self.shards.manifest.figures

    def batches(
        self,
        start: int,
        *,
        batch: int | BatchSchedule,
        rows: slice | Mapping[int, slice] | None = None,
        skips: Sequence[tuple[int, int]] = (),
        warn: Log = lambda _: None,
        lost: list[Piece] | None = None,
        gather: Gather = lambda value: [value],
    ) -> Iterator[Tokens]:
        """Return an endless iterator of the host's rows of the global batches, read ahead by Grain.

        Args:
          start: first step.
          batch: rows of a global batch, or their schedule.
          rows: the host's rows of a batch, by batch size if sizes differ; all of them by default.
          skips: ranges [low, high) of batch numbers in the stream that are left out.
          warn: called for rows that cannot be read.
          lost: pieces that could not be read before `start`; those of each batch are added.
          gather: returns the values of all processes on the first one, and nothing on the others.

        Raises:
          DataError: if the set has fewer rows than a batch; from the iterator, if a shard is
            damaged.
          WorkerLost: from the iterator, if a worker process died.
        """
        if not isinstance(batch, BatchSchedule):
            batch = constant_schedule(batch, self.sequence)
        schedule = batch
        self.check_batch(schedule)
        sizes = [stage.rows for stage in schedule.phases]
        import grain

        if rows is None or isinstance(rows, slice):
            rows = {size: rows or slice(0, size) for size in sizes}
        host_rows = dict(rows)
        steps = grain.MapDataset.source(_Steps(self, schedule, host_rows, tuple(skips)))[start:]
        options = grain.ReadOptions(
            num_threads=min(4, self.prefetch), prefetch_buffer_size=self.prefetch
        )
        dataset = steps.to_iter_dataset(options)
        if self.workers:
            from absl import flags

            # Grain's workers read absl flags, which are not parsed here
            flags.FLAGS.mark_as_parsed()
            # Send batches through a pipe: many containers have 64 MB of shared memory, and a killed
            # worker leaks it.
            dataset = grain.experimental.WithOptionsIterDataset(
                dataset, grain.experimental.DatasetOptions(min_shm_size=2**62)
            ).mp_prefetch(
                grain.MultiprocessingOptions(
                    num_workers=self.workers, per_worker_buffer_size=self.prefetch
                ),
                worker_init_fn=_end_with_parent,
            )
        stream = _closing(iter(dataset))
        if self.max_lost is None:
            return stream

        def losses(step: int) -> Callable[[], Iterator[LostPiece]]:
            number = batch_number(step, skips)
            return lambda: self._losses_at(number, schedule, host_rows)

        read = ((each, losses(step)) for step, each in enumerate(stream, start))
        limit = LossLimit(self.shards.manifest.tokens, self.max_lost)
        return skip_damaged(read, limit, [] if lost is None else lost, warn, gather)

    def at(self, step: int, *, batch: int | BatchSchedule, rows: slice) -> Tokens:
        """Return the given rows of the global batch at `step`, uncut."""
        first = _first(step, batch)
        return self._stack(self.keys(first + rows.start, first + rows.stop))

    def keys(self, start: int, stop: int) -> list[RowKey]:
        """Return the keys of the stream's rows from `start` to `stop`."""
        size = self.plan.rows
        seed, places = self.seed, (divmod(number, size) for number in range(start, stop))
        return [RowKey(seed, e, shuffled(index, size, [seed, e])) for e, index in places]

    def documents(self, start: int, stop: int, attempt: int = 0) -> list[int]:
        """Return the prompts from `start` to `stop` of the run: every one once in an epoch.

        Each attempt has another order.
        """
        size, extra = self.shards.documents, [attempt] if attempt else []
        places = (divmod(number, size) for number in range(start, stop))
        return [shuffled(index, size, [self.seed, epoch, *extra]) for epoch, index in places]

    def evaluation(
        self, *, batch: int, rows: slice | None = None, limit: int | None = None
    ) -> Iterator[Tokens]:
        """Yield every row once in the plan's order, or `limit` batches of randomly drawn rows.

        Rows are drawn without replacement by one fixed shuffle: the same at every evaluation and in
        every run, on any number of hosts, and the first n for any batch size. (The plan has rows of
        long documents first.) Rows are changed as in the first epoch. Rows of weight 0 fill up the
        last batch of all rows.
        """
        count = self.evaluated(batch=batch, limit=limit)
        is_drawn = count < self.plan.rows
        rows = rows or slice(0, batch)

        def key(number: int) -> RowKey | None:
            if number >= count:
                return None
            row = shuffled(number, self.plan.rows, EVALUATION_SEED) if is_drawn else number
            return RowKey(self.seed, 0, row)

        for start in range(0, count, batch):
            yield self._stack([key(start + n) for n in range(rows.start, rows.stop)])

    def evaluated(self, *, batch: int, limit: int | None) -> int:
        """Return the number of rows that an `evaluation` reads."""
        return self.plan.rows if limit is None else min(limit * batch, self.plan.rows)

    def origins(self, step: int, *, batch: int | BatchSchedule) -> list[list[tuple[str, int]]]:
        """Return the (file, record) of each document of each row of the batch at `step`, uncut."""
        return [
            [self.shards.origin(int(d)) for d in self.plan.pieces(key.row)["document"]]
            for key in self.keys(_first(step, batch), _first(step + 1, batch))
        ]

    def epochs(self, rows: int) -> float:
        """Return the number of epochs in `rows` rows of the stream."""
        return rows / self.plan.rows

    def check_batch(self, schedule: BatchSchedule) -> None:
        """Raise DataError if the set has fewer rows than the largest batch."""
        rows, manifest = self.plan.rows, self.shards.manifest
        batch = max(stage.rows for stage in schedule.phases)
        if rows >= batch:
            return
        # Shorter rows would leave out documents that are not cut.
        is_cut = not manifest.figures
        shorter = (manifest.tokens - manifest.documents) // batch if is_cut else 0
        raise DataError(
            "the training data is shorter than one batch",
            where=self.shards.source,
            why=f"{manifest.tokens} tokens are {rows} row{'s' if rows > 1 else ''} of "
            f"{self.sequence}, a batch takes {batch}",
            fix=f"--config.train.batch={rows}\n"
            + (f"--config.data.sequence={shorter}\n" if shorter else "")
            + "name more files",
        )

    def _losses_at(
        self, step: int, schedule: BatchSchedule, host_rows: Mapping[int, slice]
    ) -> Iterator[LostPiece]:
        """Yield the unreadable pieces of the host's rows of the global batch at `step`."""
        rows, first = host_rows[schedule.phase(step).rows], schedule.rows(step)
        for key in self.keys(first + rows.start, first + rows.stop):
            for piece in self.plan.pieces(key.row).tolist():
                document, start, length = piece
                try:
                    self.shards.read(document, start, start + length + 1)
                except DamagedShard as error:
                    yield piece, error

    def _stack(self, keys: Sequence[RowKey | None]) -> Tokens:
        shape = (len(keys), self.sequence)
        tokens, targets, segments, positions = (np.zeros(shape, np.int32) for _ in range(4))
        weights = np.zeros(shape, np.float32)
        lost: list[tuple[int, int]] = []  # row and number of a piece that could not be read
        taught = None if self.teacher is None else np.zeros(shape, self.teacher.dtype)
        for row, key in enumerate(keys):
            slot = 0
            for segment, (document, start, length) in enumerate(
                () if key is None else self.plan.pieces(key.row), 1
            ):
                here = (row, slice(slot, slot + length))
                segments[here], positions[here] = segment, np.arange(length)
                try:
                    ids = self.shards.read(document, start, start + length + 1)
                    tokens[here], targets[here] = ids[:-1], ids[1:]
                    weights[here] = self.shards.weights(document, start + 1, start + length + 1)
                    if taught is not None:
                        assert self.teacher is not None
                        taught[here] = self.teacher.read(self.shards, document, start, length)
                except DamagedShard:
                    if self.max_lost is None:
                        raise
                    lost.append((row, segment - 1))
                slot += length
        # NumPy arrays until the batch is placed on devices, unlike everywhere else.
        batch = Tokens(tokens, targets, weights, segments, positions)  # type: ignore[arg-type]
        if taught is not None:
            columns: Any = taught["ids"].astype(np.int32), *(taught[n] for n in COLUMNS)
            batch = batch._replace(teacher=TeacherTop(*columns))
        if self.shards.manifest.answers == "steps":
            steps: Any = weights
            batch = batch._replace(steps=steps, weights=np.abs(weights))  # type: ignore[arg-type]
        elif self.shards.manifest.answers:
            batch = batch._replace(answers=self._answers(keys, lost))
        return batch if self.corruption is None else _corrupted(batch, keys, self.corruption)

    def _answers(self, keys: Sequence[RowKey | None], lost: Sequence[tuple[int, int]]) -> Answers:
        """Return the judged answers of rows; a pair with a lost piece is left out."""
        columns = np.zeros((3, len(keys), self.most_answers), np.float32)
        for row, key in enumerate(keys):
            if key is None:
                continue
            documents = self.plan.pieces(key.row)["document"]
            here = slice(len(documents))
            columns[:2, row, here] = self.shards.answers[documents].T
            if self.reference is not None:
                columns[2, row, here] = self.reference[documents]
        size = 2 if self.shards.manifest.answers == "pairs" else 1
        for row, number in lost:
            first = number - number % size
            columns[0, row, first : first + size] = 0
        sides, margins, reference = columns
        scores = None if self.reference is None else reference
        return Answers(sides, margins, scores)  # type: ignore[arg-type]

    @functools.cached_property
    def most_answers(self) -> int:
        """Answers in the arrays of a row: a multiple that every mesh divides."""
        return -(-self.plan.most_pieces // ANSWERS_MULTIPLE) * ANSWERS_MULTIPLE


def shuffled(index: int, size: int, seed: Sequence[int]) -> int:
    """Return element `index` of a permutation of range(size), in constant time."""
    from grain.experimental import index_shuffle

    if size == 1:
        return 0
    return index_shuffle(index, max_index=size - 1, seed=_drawn(*seed), rounds=ROUNDS)


@functools.lru_cache(1024)
def _drawn(*seed: int) -> int:
    return int(np.random.default_rng(seed).integers(2**31))


def _corrupted(batch: Tokens, keys: Sequence[RowKey | None], corruption: RowChange) -> Tokens:
    """Change each row by its key; rows without a key are empty."""
    fields = [each for each in batch if each is not None]
    rows = [
        Tokens(*(field[row] for field in fields))  # type: ignore[arg-type]
        for row in range(len(keys))
    ]
    changed = [corruption(row, key or RowKey(0, 0, 0)) for row, key in zip(rows, keys, strict=True)]
    columns = zip(*changed, strict=True)
    arrays = (None if each[0] is None else np.stack(each) for each in columns)
    stacked = Tokens(*arrays)  # type: ignore[arg-type]
    return stacked._replace(
        visible_until=stacked.visible_until if corruption.bidirectional else None,
        block_positions=stacked.block_positions if corruption.has_block_positions else None,
        predicts_ahead=stacked.predicts_ahead if corruption.has_ahead_weights else None,
    )


def _end_with_parent(number: int, count: int) -> None:
    """End a worker if its parent dies; Grain's workers would wait forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _closing(batches: Any) -> Iterator[Tokens]:
    """Yield the batches of a Grain iterator; close it in every case, so that its workers end."""
    try:
        while True:
            try:
                batch = next(batches)
            except RuntimeError as error:
                if "exit code" not in str(error):
                    raise
                what = "a data worker process died"
                why = str(error).partition(". ")[0]
                fix = "--config.data.workers=0    # reads in threads"
                raise WorkerLost(what, where="data.workers", why=why, fix=fix) from error
            yield batch
    finally:
        batches.close()


def batch_number(step: int, skips: Sequence[tuple[int, int]]) -> int:
    """Return the stream number of a step's batch; the ranges `skips` [low, high) are left out."""
    for low, high in sorted(skips):
        if step >= low:
            step += high - low
    return step


def constant_schedule(batch: int, sequence: int) -> BatchSchedule:
    """Return the schedule of batches of one size."""
    return BatchSchedule((Phase(0, batch, sequence),), sequence)


def _first(number: int, batch: int | BatchSchedule) -> int:
    """Return the first row of a batch in the stream."""
    return batch.rows(number) if isinstance(batch, BatchSchedule) else number * batch


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The global batches as a sequence for Grain: endless, but a sequence needs a length."""

    loader: Loader
    schedule: BatchSchedule
    host_rows: dict[int, slice]
    skips: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return 2**40

    def __getitem__(self, step: int) -> Tokens:
        batch = batch_number(step, self.skips)
        stage = self.schedule.phase(batch)
        rows = self.loader.at(batch, batch=self.schedule, rows=self.host_rows[stage.rows])
        return rows if stage.length == self.loader.sequence else cut_rows(rows, stage.length)


def with_pair(batch: Tokens) -> Tokens:
    """Return a host's batch whose rows are a pair each: a half and the other half of the slots."""
    rows, length = batch.tokens.shape
    halves = 1 + 2 * np.arange(length) // length
    segments = np.where(np.asarray(batch.segments) > 0, halves, 0).astype(np.int32)
    sides = np.zeros((rows, ANSWERS_MULTIPLE), np.float32)
    sides[:, :2] = 1, -1
    positions = np.broadcast_to(np.arange(length) - length // 2 * (halves - 1), segments.shape)
    return batch._replace(
        segments=segments,  # type: ignore[arg-type]
        positions=positions.astype(np.int32),  # type: ignore[arg-type]
        answers=Answers(sides, 0 * sides, 0 * sides),  # type: ignore[arg-type]
    )


def with_steps(batch: Tokens) -> Tokens:
    """Return a host's batch in which slots with a loss end a step, right and wrong in turns."""
    labels: Any = np.sign(batch.weights) * (1 - 2 * (np.arange(batch.tokens.shape[1]) % 2))
    return batch._replace(steps=labels.astype(np.float32))


def with_rollout(batch: Tokens) -> Tokens:
    """Return a host's batch whose rows are samples with advantages of both signs."""
    weights = np.asarray(batch.weights)
    signs = 1 - 2 * (np.arange(len(weights)) % 2)[:, None]
    likelihood = np.full_like(weights, -np.log(1 + np.max(batch.targets)))
    columns: Any = likelihood, signs * (weights > 0), weights > 0
    return batch._replace(rollout=Rollout(*(each.astype(np.float32) for each in columns)))


def with_values(batch: Tokens) -> Tokens:
    """Return a host's batch of samples with values of 0, and returns that are the advantages."""
    assert batch.rollout is not None
    advantages = batch.rollout.advantages
    columns: dict[str, Any] = {"values": np.zeros_like(advantages), "returns": advantages}
    return batch._replace(rollout=batch.rollout._replace(**columns))


def cut_rows(batch: Tokens, length: int) -> Tokens:
    """Cut each row [T] of a host's batch into T / length rows, in order, without losing tokens.

    Each new row starts with segment 1 at position 0, as if packed at that length. Only for causal
    and mtp rows: other objectives relate the parts of a row, such as a sentinel and its span.
    """
    tokens, targets, weights, segments, positions = (
        np.asarray(field).reshape(-1, length) for field in batch[:5]
    )
    first = segments[:, :1]
    is_first = segments == first
    positions = np.where(is_first & (segments > 0), positions - positions[:, :1], positions)
    segments = np.where(segments > 0, segments - first + 1, 0).astype(np.int32)
    fields = tokens, targets, weights, segments, positions.astype(np.int32)
    rows = Tokens(*fields)  # type: ignore[arg-type]
    if batch.teacher is None:
        return rows
    cut: Any = (x.reshape(-1, length, *x.shape[2:]) for x in batch.teacher)
    return rows._replace(teacher=TeacherTop(*cut))


def with_teacher_top(batch: Tokens, top: int) -> Tokens:
    """Return a host's batch with a teacher whose `top` likeliest ids are the first ones."""
    shape = batch.tokens.shape
    ids = np.broadcast_to(np.arange(top, dtype=np.int32), (*shape, top))
    log_p = np.full(ids.shape, -np.log(top + 1), np.float16)
    columns: Any = ids, log_p, log_p[..., 0], log_p[..., 0]
    return batch._replace(teacher=TeacherTop(*columns))


class LossLimit(NamedTuple):
    """The tokens of a set, and the largest share of them that may be unreadable."""

    tokens: int
    most: float


def skip_damaged(
    stream: Iterator[tuple[Tokens, Callable[[], Iterator[LostPiece]]]],
    limit: LossLimit,
    lost: list[Piece],
    warn: Log,
    gather: Gather,
) -> Iterator[Tokens]:
    """Yield the batches of a stream, and warn about each piece that could not be read.

    Args:
      stream: batches in which unreadable tokens have weight 0, each with a function that lists the
        unreadable pieces of the batch.
      limit: largest part of the set that may be lost.
      lost: pieces that were lost before; those of each batch are added.
      warn: called once per lost piece, with the total.
      gather: see `Loader.batches`; the first process counts the pieces of all.

    Raises:
      DataError: if more than the limit was lost.
    """
    known = set(lost)
    total = sum(count for *_, count in lost)
    for batch, losses in stream:
        here = []
        if np.any((batch.segments > 0) & (batch.weights == 0)):
            here = [(p, e.where, e.why, e.fix) for p, e in losses() if p not in known]
        for each, where, why, fix in itertools.chain(*gather(here)):
            piece = (*each,)
            if piece in known:
                continue
            known.add(piece)
            lost.append(piece)
            total += piece[2]
            warn(
                f"not trained on: {piece[2]} tokens of {where} ({why}); {total} tokens in "
                f"{len(lost)} pieces so far, {total / limit.tokens:.2g} of all"
            )
            if total > limit.most * limit.tokens:
                raise DataError(
                    "too much of the training data is damaged",
                    where=where,
                    why=f"{total} of {limit.tokens} tokens could not be read; data.max_dropped = "
                    f"{limit.most:g} of them may be lost",
                    fix=f"{fix.splitlines()[0]}\n--config.data.max_dropped=1    # accepts any loss",
                )
        yield batch
