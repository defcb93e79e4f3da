"""Objectives as changes of packed rows: split a row into pieces, change them, pack again."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from jaxtyping import Float, Int

from jaxlm.data.batch import Tokens

Ids = Int[np.ndarray, "n"]
NOISE = 0x6E6F6973  # separates these draws from those of the row order, with the same seed


class Key(NamedTuple):
    """Position of a row in the data; determines all draws, on every host and after every resume."""

    seed: int
    epoch: int
    row: int  # row of the plan

    def draws(self, *more: int, is_fixed: bool = False) -> np.random.Generator:
        """Return the row's generator, equal in all epochs if `is_fixed`; `more` seeds another."""
        epoch = 0 if is_fixed else self.epoch
        return np.random.default_rng([NOISE, self.seed, epoch, self.row, *more])


class Piece(NamedTuple):
    """Slots of one changed piece: inputs, targets, weights, positions and attention limits.

    `inner` is a second position of each slot, 0 if None. `ahead` trains multi-token prediction.
    """

    tokens: Ids
    targets: Ids
    weights: Float[np.ndarray, "n"]
    positions: Ids
    reach: Ids  # last visible slot, counted from 0 in the piece
    inner: Ids | None = None
    ahead: bool = False


Made = TypeVar("Made")  # result for one piece: a `Piece` or a `pairs.Pair`
Change = Callable[[Sequence[Ids], int, Key], list[Made]]


class Reading(NamedTuple):
    """Changes of rows in training, and in evaluations by the suffix of the validation set's name.

    None leaves rows unchanged.
    """

    train: "AnyCorruption | None" = None
    evaluations: "Mapping[str, AnyCorruption | None]" = MappingProxyType({"": None})


class AnyCorruption(Protocol):
    """An objective's change of a row, as a pure function of row and key."""

    @property
    def room(self) -> int:
        """Slots of each row that the plan leaves free for added ids."""
        ...

    @property
    def both_ways(self) -> bool:
        """If some slots attend to later ones."""
        ...

    @property
    def has_inner(self) -> bool:
        """If slots have a second position."""
        ...

    @property
    def has_ahead(self) -> bool:
        """If only some rows train multi-token prediction."""
        ...

    def __call__(self, row: Tokens, key: Key) -> Tokens:
        """Change one row."""
        ...


@dataclasses.dataclass(frozen=True)
class Corruption:
    """Change of a row by changing its pieces independently.

    Args:
      change: takes the ids of the pieces, each with the id that its last slot predicts, and the
        free slots of the row; returns the changed pieces.
      room: slots of each row that the plan leaves free for added ids.
      both_ways: if some slots attend to later ones.
      has_inner: if slots have a second position.
      has_ahead: if only some rows train multi-token prediction.
    """

    change: Change[Piece]
    room: int = 0
    both_ways: bool = False
    has_inner: bool = False
    has_ahead: bool = False

    def __call__(self, row: Tokens, key: Key) -> Tokens:
        """Change one row [T]. Unreadable pieces stay in place with weight 0."""
        pieces = whole_pieces(row)
        free = int((row.segments == 0).sum())
        changed = iter(self.change([ids for ids in pieces if ids is not None], free, key))
        laid = [
            _unread(int((row.segments == segment).sum())) if ids is None else next(changed)
            for segment, ids in enumerate(pieces, 1)
        ]
        return _packed(laid, len(row.tokens))


def whole_pieces(row: Tokens) -> list[Ids | None]:
    """Return the ids of each piece, with the last predicted id; None if a piece is unreadable."""
    pieces: list[Ids | None] = []
    for segment in range(1, row.segments.max(initial=0) + 1):
        slots = np.flatnonzero(row.segments == segment)
        is_read = bool(row.weights[slots].any())
        pieces.append(np.append(row.tokens[slots], row.targets[slots[-1]]) if is_read else None)
    return pieces


def causal(ids: Sequence[Ids], free: int, key: Key) -> list[Piece]:
    """Leave every piece unchanged."""
    return [left_to_right(piece) for piece in ids]


def further(ids: Sequence[Ids], free: int, key: Key) -> list[Piece]:
    """Leave every piece unchanged; also train multi-token prediction."""
    return [left_to_right(piece)._replace(ahead=True) for piece in ids]


def mixture(
    ids: Sequence[Ids],
    free: int,
    key: Key,
    *,
    changes: tuple[Change[Made], ...],
    shares: tuple[float, ...],
    number: int,
) -> list[Made]:
    """Apply one of `changes` to the whole row, drawn by its share.

    Args:
      ids: ids of each piece.
      free: free slots of the row.
      key: key of the row.
      changes: the changes.
      shares: probability of each.
      number: seed of the draw; nested mixtures need different ones.
    """
    chosen = int(key.draws(number).choice(len(changes), p=shares))
    return changes[chosen](ids, free, key)


def portion(length: int, share: float) -> int:
    """Return the number of ids in a share of `length`: at least one, and not all."""
    return min(max(round(share * length), 1), length - 1)


def left_to_right(ids: Ids, known: int = 0) -> Piece:
    """Predict each id from those before; the first `known` are bidirectional, without loss."""
    slots = np.arange(len(ids) - 1, dtype=np.int32)
    return Piece(
        tokens=ids[:-1],
        targets=ids[1:],
        weights=(slots >= known - 1).astype(np.float32),
        positions=slots,
        reach=np.maximum(slots, known - 1),
    )


def _unread(length: int) -> Piece:
    return left_to_right(np.zeros(length + 1, np.int32), length + 2)


def _packed(pieces: list[Piece], length: int) -> Tokens:
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
        reach[here] = np.minimum(piece.reach + start, end - 1)
        if piece.inner is not None:
            inner[here] = piece.inner
        ahead[here] = piece.ahead
        start = end
    fields = tokens, targets, weights, segments, positions, reach, inner, ahead
    return Tokens(*fields)  # type: ignore[arg-type]
