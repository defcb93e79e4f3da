"""Objectives as changes of packed rows: split a row into pieces, change them, pack again.

Example:
  >>> left_to_right(np.array([1, 7, 8, 2]), known=2).weights.tolist()
  [0.0, 1.0, 1.0]
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int

from jaxlm.data.batch import Tokens

Ids = Int[np.ndarray, "n"]
NOISE = 0x6E6F6973  # separates these draws from those of the row order, with the same seed


class RowKey(NamedTuple):
    """Position of a row in the data; determines all draws, on every host and after every resume."""

    seed: int
    epoch: int
    row: int  # row of the plan

    def rng(self, *more: int, is_fixed: bool = False) -> np.random.Generator:
        """Return the row's generator, equal in all epochs if `is_fixed`; `more` seeds another."""
        epoch = 0 if is_fixed else self.epoch
        return np.random.default_rng([NOISE, self.seed, epoch, self.row, *more])


class ChangedPiece(NamedTuple):
    """Slots of one changed piece: inputs, targets, weights, positions and attention limits.

    `block_positions` are second positions, 0 if None. `predicts_ahead` trains multi-token
    prediction.
    """

    tokens: Ids
    targets: Ids
    weights: Float[np.ndarray, "n"]
    positions: Ids
    visible_until: Ids  # last visible slot, counted from 0 in the piece
    block_positions: Ids | None = None
    predicts_ahead: bool = False


PieceResult = TypeVar("PieceResult")  # a `ChangedPiece` or a `pairs.SourceTarget`
PieceChange = Callable[[Sequence[Ids], int, RowKey], list[PieceResult]]


class RowChanges(NamedTuple):
    """Changes of rows in training, and in evaluations by the suffix of the validation set's name.

    None leaves rows unchanged.
    """

    train: "RowChange | None" = None
    evaluations: "Mapping[str, RowChange | None]" = MappingProxyType({"": None})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowChange(abc.ABC):
    """An objective's change of a row, as a pure function of row and key."""

    reserved_slots: int = 0  # slots of each row that the plan leaves free for added ids
    bidirectional: bool = False  # some slots attend to later ones
    has_block_positions: bool = False  # slots have a second position
    has_ahead_weights: bool = False  # only some rows train multi-token prediction

    @abc.abstractmethod
    def __call__(self, row: Tokens, key: RowKey) -> Tokens:
        """Change one row."""


@dataclasses.dataclass(frozen=True)
class Corruption(RowChange):
    """Change of a row by changing its pieces independently.

    `change` takes the ids of the pieces, each with the id that its last slot predicts, and the free
    slots of the row; it returns the changed pieces.
    """

    change: PieceChange[ChangedPiece]

    def __call__(self, row: Tokens, key: RowKey) -> Tokens:
        """Change one row [T]. Unreadable pieces stay in place with weight 0."""
        pieces = whole_pieces(row)
        free = int((row.segments == 0).sum())
        changed = iter(self.change([ids for ids in pieces if ids is not None], free, key))
        placed = []
        for segment, ids in enumerate(pieces, 1):
            if ids is None:
                length = int((row.segments == segment).sum())
                placed.append(left_to_right(np.zeros(length + 1, np.int32), length + 2))
            else:
                placed.append(next(changed))
        return _packed(placed, len(row.tokens))


def whole_pieces(row: Tokens) -> list[Ids | None]:
    """Return the ids of each piece, with the last predicted id; None if a piece is unreadable."""
    pieces: list[Ids | None] = []
    for segment in range(1, row.segments.max(initial=0) + 1):
        slots = np.flatnonzero(row.segments == segment)
        is_read = bool(row.weights[slots].any())
        pieces.append(np.append(row.tokens[slots], row.targets[slots[-1]]) if is_read else None)
    return pieces


def change_in_random_order(
    ids: Sequence[Ids],
    free: int,
    key: RowKey,
    change: Callable[[Ids, int, np.random.Generator], tuple[PieceResult, int]],
) -> list[PieceResult]:
    """Change each piece by `change`, which returns the result and the free slots that it takes.

    The order is random, so that no piece is favored by the free slots.
    """
    rng = key.rng()
    results: dict[int, PieceResult] = {}
    for number in rng.permutation(len(ids)).tolist():
        results[number], used = change(ids[number], free, rng)
        free -= used
    return [results[number] for number in range(len(ids))]


def causal(ids: Sequence[Ids], free: int, key: RowKey) -> list[ChangedPiece]:
    """Leave every piece unchanged."""
    return [left_to_right(piece) for piece in ids]


def causal_with_mtp(ids: Sequence[Ids], free: int, key: RowKey) -> list[ChangedPiece]:
    """Leave every piece unchanged; also train multi-token prediction."""
    return [left_to_right(piece)._replace(predicts_ahead=True) for piece in ids]


def split_prefix(
    ids: Sequence[Ids], free: int, key: RowKey, *, share: float | None = None
) -> list[ChangedPiece]:
    """Split each piece into a bidirectional prefix and a predicted rest, both not empty.

    The rest is the last `share` of the ids; the split is uniform if `share` is None.

    Source: Raffel et al. 2020, arXiv:1910.10683, sections 3.2.1 (prefix LM) and 3.3.1 (random
    split).
    """
    rng = key.rng()

    def prefix(length: int) -> int:
        if share is None:
            return int(rng.integers(1, length))
        return length - count_of_share(length, share)

    return [left_to_right(piece, prefix(len(piece))) for piece in ids]


def draw_change(
    ids: Sequence[Ids],
    free: int,
    key: RowKey,
    *,
    changes: tuple[PieceChange[PieceResult], ...],
    shares: tuple[float, ...],
    number: int,
) -> list[PieceResult]:
    """Apply one of `changes` to the whole row, drawn by its share.

    Args:
      shares: probability of each change.
      number: seed of the draw; nested mixtures need different ones.
    """
    chosen = int(key.rng(number).choice(len(changes), p=shares))
    return changes[chosen](ids, free, key)


def count_of_share(length: int, share: float) -> int:
    """Return the number of ids in a share of `length`: at least one, and not all."""
    return min(max(round(share * length), 1), length - 1)


def left_to_right(ids: Ids, known: int = 0) -> ChangedPiece:
    """Predict each id from those before; the first `known` are bidirectional, without loss."""
    slots = np.arange(len(ids) - 1, dtype=np.int32)
    return ChangedPiece(
        tokens=ids[:-1],
        targets=ids[1:],
        weights=(slots >= known - 1).astype(np.float32),
        positions=slots,
        visible_until=np.maximum(slots, known - 1),
    )


def _packed(pieces: list[ChangedPiece], length: int) -> Tokens:
    """Return the row of these pieces in order. Raise ValueError if they do not fit."""
    tokens, targets, segments, positions, inner = (np.zeros(length, np.int32) for _ in range(5))
    weights, ahead = (np.zeros(length, np.float32) for _ in range(2))
    reach = np.arange(length, dtype=np.int32)
    start = 0
    for segment, piece in enumerate(pieces, 1):
        end = start + len(piece.tokens)
        if end > length:
            raise ValueError(f"{end} ids or more for a row of {length}")
        here = slice(start, end)
        tokens[here], targets[here], weights[here] = piece.tokens, piece.targets, piece.weights
        segments[here], positions[here] = segment, piece.positions
        reach[here] = np.minimum(piece.visible_until + start, end - 1)
        if piece.block_positions is not None:
            inner[here] = piece.block_positions
        ahead[here] = piece.predicts_ahead
        start = end
    fields = tokens, targets, weights, segments, positions, reach, inner, ahead
    return Tokens(*fields)  # type: ignore[arg-type]
