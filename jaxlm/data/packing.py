"""Packing plans: (document, start, length) of each piece of each row, planned by windows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from jaxlm.core import disk
from jaxlm.data import cache
from jaxlm.data.shards import AnyShards

VERSION = 2
FILES = "rows.bin", "pieces.bin"
WINDOW = 8192  # documents that are shuffled and packed together
PIECE = np.dtype([("document", np.int64), ("start", np.int64), ("length", np.int32)])

Packing = Literal["concat", "first_fit"]


class PackingPlan:
    """The rows of a shard set: every position of every document is in exactly one row.

    A document of n ids has n - 1 positions, each an id and its successor. A row of T slots holds
    pieces; a piece is a run of positions of one document. The seed decides once which documents
    share a row; the loader shuffles the order of rows in every epoch.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        # Plain arrays: slicing a memmap creates a memmap object each time.
        self._ends = np.asarray(np.memmap(folder / FILES[0], np.int64, "r"))
        self._pieces = np.asarray(np.memmap(folder / FILES[1], PIECE, "r"))

    def __reduce__(self) -> tuple[type["PackingPlan"], tuple[Path]]:
        return PackingPlan, (self._folder,)  # a worker process maps the files itself

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._ends)

    @property
    def most_pieces(self) -> int:
        """Largest number of pieces of a row."""
        return int(np.diff(self._ends, prepend=0).max())

    def pieces(self, row: int) -> np.ndarray:
        """Return the pieces of a row, in order: (document, start, length)."""
        return self._pieces[int(self._ends[row - 1]) if row else 0 : int(self._ends[row])]


def open_plan(
    shards: AnyShards, sequence: int, packing: Packing, seed: int, folder: Path
) -> PackingPlan:
    """Return the plan in `folder`, which is written first if it is incomplete.

    Both documents of a pair are in one row, one behind the other.

    Args:
      packing: see `DataConfig.packing`.
      seed: seed of the order of documents.
      folder: folder of the plan. Memory is that of one window.
    """
    if not (folder.exists() and _is_whole(folder)):
        with cache.building(folder, _is_whole) as partial:
            if partial is not None:
                _write(partial, _rows(shards, sequence, packing, seed))
    return PackingPlan(folder)


def _write(folder: Path, windows: Iterator[tuple[np.ndarray, np.ndarray]]) -> None:
    count = 0
    with open(folder / FILES[0], "wb") as rows, open(folder / FILES[1], "wb") as pieces:
        for part, ends in windows:
            pieces.write(part.tobytes())
            rows.write((ends + count).tobytes())
            count += len(part)
    (folder / "digest").write_text(_digest(folder))


def _is_whole(folder: Path) -> bool:
    """Return if the files match their digest; hashing takes 1 s per 10^8 pieces of 20 bytes."""
    try:
        return (folder / "digest").read_text() == _digest(folder)
    except (OSError, UnicodeDecodeError):
        return False


def _digest(folder: Path) -> str:
    return "\n".join(disk.sha256(folder / name) for name in FILES)


def _rows(
    shards: AnyShards, sequence: int, packing: Packing, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (pieces, end of each row among them) for each window."""
    filled = 0
    held = np.zeros(0, PIECE)  # pieces of the last, incomplete row
    for documents, positions in _windows(shards, seed):
        if shards.manifest.answers == "pairs":
            yield _best_fit_of_pairs(documents, positions, sequence)
            continue
        if packing == "first_fit":
            yield _best_fit(documents, positions, sequence)
            continue
        pieces, rows = _cut(documents, positions, sequence, filled)
        total = filled + int(positions.sum())
        pieces = np.concatenate((held, pieces))
        rows = np.concatenate((np.zeros(len(held), np.int64), rows))
        whole = total // sequence
        ready = int(np.searchsorted(rows, whole))
        yield pieces[:ready], np.searchsorted(rows[:ready], np.arange(whole), side="right")
        held, filled = pieces[ready:], total % sequence
    if filled:
        yield held, np.array([len(held)])


def _windows(shards: AnyShards, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield documents and their numbers of positions; windows are shuffled, and each within.

    Of a pair, the first document is yielded with the positions of both, [n, 2].
    """
    size = 2 if shards.manifest.answers == "pairs" else 1
    starts = np.arange(0, shards.documents, WINDOW)
    for window in np.random.default_rng([seed, len(starts)]).permutation(len(starts)):
        start = int(starts[window])
        positions = shards.lengths(start, min(start + WINDOW, shards.documents)) - 1
        if size == 2:
            positions = positions.reshape(-1, 2)
        order = np.random.default_rng([seed, len(starts), int(window)]).permutation(len(positions))
        yield start + size * order, positions[order]


def _cut(
    documents: np.ndarray, positions: np.ndarray, sequence: int, filled: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pieces and rows of joined documents; the first row has `filled` used slots."""
    ends = filled + np.cumsum(positions)
    begins = ends - positions
    counts = (ends - 1) // sequence - begins // sequence + 1
    owner = np.repeat(np.arange(len(documents)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = begins[owner] // sequence + nth
    left = np.maximum(begins[owner], rows * sequence)
    right = np.minimum(ends[owner], (rows + 1) * sequence)
    pieces = np.empty(len(owner), PIECE)
    pieces["document"] = documents[owner]
    pieces["start"], pieces["length"] = left - begins[owner], right - left
    return pieces, rows


def _best_fit_of_pairs(
    documents: np.ndarray, positions: np.ndarray, sequence: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pack pairs as `_best_fit` packs documents; both pieces of a pair are adjacent."""
    pairs, ends = _best_fit(np.arange(len(documents)), positions.sum(1), sequence)
    order = pairs["document"]
    pieces = np.zeros(2 * len(order), PIECE)
    pieces["document"] = (documents[order][:, None] + np.arange(2)).ravel()
    pieces["length"] = positions[order].ravel()
    return pieces, 2 * ends


def _best_fit(
    documents: np.ndarray, positions: np.ndarray, sequence: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pack with best-fit decreasing; return pieces and the end of each row.

    Documents longer than a row fill whole rows first; the rests go longest first, each into the
    fullest row with room. `by_room` lists the open rows by free slots, and bit n of `rooms` is set
    if a row has n free slots, so that placing a piece takes about a microsecond.
    """
    full = positions // sequence
    owner = np.repeat(np.arange(len(documents)), full)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(full) - full, full)
    rest = positions % sequence
    placed: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(sequence + 1)]
    rooms = 0
    for index in np.argsort(-rest, kind="stable").tolist():
        size = int(rest[index])
        if size == 0:
            break
        if fitting := rooms >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
            placed[row].append(index)
        else:
            room, row = sequence, len(placed)
            placed.append([index])
        if left := room - size:
            by_room[left].append(row)
            rooms |= 1 << left
    last = np.array([index for row in placed for index in row], np.int64)
    pieces = np.empty(len(owner) + len(last), PIECE)
    pieces["document"] = documents[np.concatenate((owner, last))]
    pieces["start"] = np.concatenate((nth, full[last])) * sequence
    pieces["length"] = np.concatenate((np.full(len(owner), sequence), rest[last]))
    placed_ends = len(owner) + np.cumsum([len(row) for row in placed], dtype=np.int64)
    ends = np.concatenate((np.arange(1, len(owner) + 1), placed_ends))
    return pieces, ends.astype(np.int64)
