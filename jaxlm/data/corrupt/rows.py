"""Packed rows as their documents' pieces, which an objective changes, and laid out again."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from jaxtyping import Float, Int

from jaxlm.data.batch import Tokens

Ids = Int[np.ndarray, "n"]
NOISE = (
    0x6E6F6973  # sets these draws apart from those of the data's order, which have the same seed
)


class Key(NamedTuple):
    """Where a row is read: all that its draws depend on, so that they are the same on every host and after every resume."""

    seed: int
    epoch: int
    row: int  # of the plan

    def draws(self, *more: int, is_fixed: bool = False) -> np.random.Generator:
        """Random numbers of this row, in every epoch the same where `is_fixed`; `more` numbers give others."""
        epoch = 0 if is_fixed else self.epoch
        return np.random.default_rng([NOISE, self.seed, epoch, self.row, *more])


class Piece(NamedTuple):
    """What becomes of one document's piece: slots with what is read, what is predicted there, and how far each sees.

    `inner` is a second position of each slot; None is 0 for all. `ahead` is whether tokens beyond the next are predicted too.
    """

    tokens: Ids
    targets: Ids
    weights: Float[np.ndarray, "n"]
    positions: Ids
    reach: Ids  # slots of the piece, counted from 0
    inner: Ids | None = None
    ahead: bool = False


Made = TypeVar("Made")  # of a document's piece: a `Piece`, or a `pairs.Pair`
Change = Callable[[Sequence[Ids], int, Key], list[Made]]


class Reading(NamedTuple):
    """How rows are read: in training, and in the evaluations, by what each adds to the name of a validation set.

    None reads rows as they are.
    """

    train: "AnyCorruption | None" = None
    evaluations: "Mapping[str, AnyCorruption | None]" = MappingProxyType({"": None})


class AnyCorruption(Protocol):
    """What an objective makes of a row, as a pure function of it and of where it is read."""

    @property
    def room(self) -> int:
        """Slots of each row that the plan leaves free for what is added."""
        ...

    @property
    def both_ways(self) -> bool:
        """Whether some slots see further than themselves."""
        ...

    @property
    def has_inner(self) -> bool:
        """Whether slots have a second position."""
        ...

    @property
    def has_ahead(self) -> bool:
        """Whether only some rows predict tokens beyond the next."""
        ...

    def __call__(self, row: Tokens, key: Key) -> Tokens:
        """One row, changed."""
        ...


@dataclasses.dataclass(frozen=True)
class Corruption:
    """How an objective changes rows, as a pure function of a row and of where it is read.

    Args:
      change: of the ids of the row's pieces, each with the one that its last slot predicts, and the number of slots that
        are left over: what becomes of each piece. No piece sees another's ids.
      room: slots of each row that the plan leaves free for what is added.
      both_ways: whether some slots see further than themselves.
      has_inner: whether slots have a second position.
      has_ahead: whether only some rows predict tokens beyond the next.
    """

    change: Change[Piece]
    room: int = 0
    both_ways: bool = False
    has_inner: bool = False
    has_ahead: bool = False

    def __call__(self, row: Tokens, key: Key) -> Tokens:
        """One row [T], changed. Pieces that could not be read stay as they are, without weight."""
        pieces = whole_pieces(row)
        free = int((row.segments == 0).sum())
        changed = iter(self.change([ids for ids in pieces if ids is not None], free, key))
        laid = [
            _unread(int((row.segments == segment).sum())) if ids is None else next(changed)
            for segment, ids in enumerate(pieces, 1)
        ]
        return _packed(laid, len(row.tokens))


def whole_pieces(row: Tokens) -> list[Ids | None]:
    """The ids of each piece of a row, with the one that its last slot predicts; None where it could not be read."""
    found: list[Ids | None] = []
    for segment in range(1, row.segments.max(initial=0) + 1):
        slots = np.flatnonzero(row.segments == segment)
        is_read = bool(row.weights[slots].any())
        found.append(np.append(row.tokens[slots], row.targets[slots[-1]]) if is_read else None)
    return found


def causal(ids: Sequence[Ids], free: int, key: Key) -> list[Piece]:
    """Every piece as it is."""
    return [left_to_right(piece) for piece in ids]


def further(ids: Sequence[Ids], free: int, key: Key) -> list[Piece]:
    """Every piece as it is; tokens beyond the next are predicted too."""
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
    """One of `changes` for the whole row, drawn by their shares; mixtures inside of each other have another `number`."""
    chosen = int(key.draws(number).choice(len(changes), p=shares))
    return changes[chosen](ids, free, key)


def portion(length: int, share: float) -> int:
    """How many of so many ids are a share of them: at least one, and not all."""
    return min(max(round(share * length), 1), length - 1)


def left_to_right(ids: Ids, known: int = 0) -> Piece:
    """Each id is predicted from those before it, but for the first `known`: they are read both ways, and not trained on."""
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
    """The row of these pieces, one after another.

    Raises:
      ValueError: where they do not fit.
    """
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
    return Tokens(tokens, targets, weights, segments, positions, reach, inner, ahead)  # type: ignore[arg-type]
