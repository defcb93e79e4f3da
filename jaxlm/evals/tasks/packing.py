"""Rows of requests: the ids that requests of one item begin with are read once.

Example:
  >>> both = ((1, 7, 8, 4), (1, 7, 9, 4))
  >>> requests = [ScoringRequest(ids, 2, spans_border=False) for ids in both]
  >>> (group,) = groups(requests, 16, is_shared=True)
  >>> group.prefix, group.suffixes, group.targets
  ((1, 7), ((8,), (9,)), ((1, 8), (2, 4), (1, 9), (3, 4)))
  >>> packed([(5, 5), (3, 3), (4, 4), (2, 2)], RowShape(8, 8))
  [[0, 1], [2, 3]]
"""

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxlm.data.batch import Tokens
from jaxlm.evals.tasks.requests import ScoringRequest
from jaxlm.models.config import ModelConfig

MIN_SLOTS = 256  # of a row, if the context is as long
MIN_TARGETS = 32
SPARE = 1.25  # targets, above the mean of the task
MAX_SLOTS = 1024  # of a row that has no longer group
ATTENTION_SLOTS = 4096  # of a row whose attention costs as much as its other products
PACKED_FIRST = 1000  # groups that are packed to choose the length of rows


class RowShape(NamedTuple):
    """Shape of the rows of a task: slots for tokens, and scored targets.

    Both are powers of two, unless the context is none, so that tasks share few compiled programs.
    """

    slots: int
    targets: int


class PrefixGroup(NamedTuple):
    """Requests that are read together.

    Slots are counted from the first of the group: those of the prefix, then of each suffix.

    Args:
      prefix: ids that all requests read first.
      suffixes: ids that each request reads after them.
      targets: slot and following id, without repetition.
      scored: indices of the targets of each request.
    """

    prefix: tuple[int, ...]
    suffixes: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, int], ...]
    scored: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> tuple[int, int]:
        """Numbers of slots and of targets."""
        return len(self.prefix) + sum(map(len, self.suffixes)), len(self.targets)


class Sizes:
    """Totals, maxima and first sizes of the groups of a task: the shape of its rows follows."""

    def __init__(self) -> None:
        self._totals, self._largest = [0, 0], [0, 0]
        self._first: list[tuple[int, int]] = []

    def add(self, prefix_groups: Iterable[PrefixGroup]) -> int:
        """Count groups; return their slots."""
        slots = 0
        for group in prefix_groups:
            size = group.size
            slots += size[0]
            if len(self._first) < PACKED_FIRST:
                self._first.append(size)
            self._totals = [total + more for total, more in zip(self._totals, size, strict=True)]
            self._largest = list(map(max, self._largest, size))
        return slots

    def shape(self, limit: int, parts: int) -> RowShape:
        """Return the shape of the rows: of the lengths, that with the least work.

        Args:
          limit: length of rows that the model reads.
          parts: devices that share a row; then it has this length.
        """
        longest, most = self._largest
        slots = max(MIN_SLOTS, _power(longest))
        if parts > 1 or slots >= limit:
            slots = limit
        else:
            lengths = [slots]
            while 2 * lengths[-1] <= min(limit, MAX_SLOTS):
                lengths.append(2 * lengths[-1])
            slots = min(lengths, key=self._work)
        density = self._totals[1] / self._totals[0]
        needed = max(most, min(slots, math.ceil(SPARE * density * slots)))
        targets = max(needed, min(slots, max(MIN_TARGETS, _power(needed))))
        return RowShape(slots, math.ceil(targets / parts) * parts)

    def _work(self, slots: int) -> float:
        """Return the work of the first groups in rows of this length, attention included."""
        rows = packed(self._first, RowShape(slots, 2**31))
        return len(rows) * slots * (1 + slots / ATTENTION_SLOTS)


def _power(size: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (size - 1).bit_length()


def is_shareable(model: ModelConfig, limit: int, parts: int) -> bool:
    """Return whether texts in a row can share a prefix.

    Not so in models whose attention depends on distances in slots, or whose kernel compares
    segments alone.

    Args:
      model: the model, with the attention kernels of its layers.
      limit: length of rows that it reads.
      parts: devices that share a row.
    """
    return parts == 1 and all(
        attention.kernel not in ("ring", "splash")
        and attention.relative is None
        and (attention.window is None or attention.window >= limit)
        and (attention.rotary is None or attention.rotary.beyond is None)
        for attention in (layer.attention for layer in model.layers)
    )


def groups(requests: Sequence[ScoringRequest], limit: int, *, is_shared: bool) -> list[PrefixGroup]:
    """Return the groups of requests that begin with the same ids, in their order.

    Args:
      requests: the requests of an item.
      limit: largest number of slots of a group.
      is_shared: read the shared ids once; otherwise each request is a group.
    """
    parts: list[list[ScoringRequest]] = []
    for each in requests:
        if is_shared and parts and _group([*parts[-1], each]).size[0] <= limit:
            parts[-1].append(each)
        else:
            parts.append([each])
    return [_group(each) for each in parts]


def _group(requests: Sequence[ScoringRequest]) -> PrefixGroup:
    reads = [each.ids[:-1] for each in requests]
    # The shared ids of the smallest and the largest are those of all.
    pairs = enumerate(zip(min(reads), max(reads), strict=False))
    common = next((n for n, (a, b) in pairs if a != b), min(map(len, reads)))
    targets: dict[tuple[int, int], int] = {}
    scored = []
    first = common  # slot of the suffix
    for request, ids in zip(requests, reads, strict=True):
        slots = (
            n if n < common else first + n - common for n in range(request.begin - 1, len(ids))
        )
        pairs_of = zip(slots, request.ids[request.begin :], strict=True)
        scored.append(tuple(targets.setdefault(pair, len(targets)) for pair in pairs_of))
        first += len(ids) - common
    suffixes = tuple(ids[common:] for ids in reads)
    return PrefixGroup(reads[0][:common], suffixes, tuple(targets), tuple(scored))


def packed(sizes: Sequence[tuple[int, int]], shape: RowShape) -> list[list[int]]:
    """Return the indices of groups in each row: the longest first, each in the fullest row."""
    rows: list[list[int]] = []
    targets: list[int] = []  # free ones of each row
    free: list[tuple[int, int]] = []  # of each row with room, its free slots and its number
    for index in sorted(range(len(sizes)), key=lambda n: (-sizes[n][0], n)):
        length, count = sizes[index]
        first = bisect.bisect_left(free, (length, -1))
        fitting = (n for n in range(first, len(free)) if targets[free[n][1]] >= count)
        place = next(fitting, None)
        room, row = (shape.slots, len(rows)) if place is None else free.pop(place)
        if row == len(rows):
            rows.append([])
            targets.append(shape.targets)
        rows[row].append(index)
        targets[row] -= count
        if room > length:
            bisect.insort(free, (room - length, row))
    return rows


class Batch(NamedTuple):
    """Packed rows: what the model reads, and the slots and ids of the targets."""

    read: Tokens
    slots: Any  # int32 [B, C], NumPy until they are placed
    ids: Any


def batch_of(
    prefix_groups: Sequence[PrefixGroup],
    rows: Sequence[Sequence[int]],
    shape: RowShape,
    *,
    pad: int,
    is_shared: bool,
) -> Batch:
    """Return the arrays of packed rows, on the host.

    Args:
      prefix_groups: the groups.
      rows: indices of the groups of each row; a row without any is padding.
      shape: shape of a row.
      pad: id of padding.
      is_shared: groups may have several requests.
    """
    count = len(rows)
    tokens = np.full((count, shape.slots), pad, np.int32)
    segments, prefixes, positions = np.zeros((3, count, shape.slots), np.int32)
    slots, ids = np.zeros((2, count, shape.targets), np.int32)
    for row, indices in enumerate(rows):
        at, segment, scored = 0, 0, 0
        for group in (prefix_groups[index] for index in indices):
            first, before = at, len(group.prefix)
            prefix = segment + 1
            for number, part in enumerate((group.prefix, *group.suffixes)):
                segment += 1
                here = slice(at, at + len(part))
                start = before if number else 0
                tokens[row, here] = part
                segments[row, here], prefixes[row, here] = segment, prefix
                positions[row, here] = np.arange(start, start + len(part))
                at = here.stop
            here = slice(scored, scored + len(group.targets))
            if group.targets:
                places, ids[row, here] = np.transpose(group.targets)
                slots[row, here] = first + places
            scored = here.stop
    weights = np.zeros((count, shape.slots), np.float32)
    arrays: Any = (tokens, tokens, weights, segments, positions)  # NumPy until they are placed
    shared: Any = prefixes if is_shared else None
    return Batch(Tokens(*arrays)._replace(prefix_segments=shared), slots, ids)


def sums(
    prefix_groups: Sequence[PrefixGroup], indices: Sequence[int], nll: Any
) -> list[list[float]]:
    """Return the sums of each request of the groups of a row, in float64, from its targets."""
    ends = itertools.accumulate((len(prefix_groups[index].targets) for index in indices), initial=0)
    return [
        [math.fsum(nll[first + n] for n in each) for each in prefix_groups[index].scored]
        for index, first in zip(indices, ends, strict=False)
    ]
