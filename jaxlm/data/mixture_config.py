"""Settings of a mixture: which share of the rows each source of `data.train` has."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from jaxlm.core.config import Span, setting
from jaxlm.core.spelling import nearest

EPOCHS = "NAME=EPOCHS: how often a source is read at most; what it had goes to the others, in proportion to their weights"
SLACK = 1e-6  # of a sum of weights
_NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_POINT = re.compile(rf"({_NUMBER})@(.+)")

Problems = Iterator[tuple[str, str, str]]
Point = tuple[Span, float]  # where of the run, and a weight there


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temperature:
    """By size: a source of n tokens has the weight n^(1 / temperature)."""

    name: Literal["temperature"] = "temperature"
    temperature: float = setting(1.0, "1 is in proportion to size, more is nearer to even", above=0)
    epochs: tuple[str, ...] = setting((), EPOCHS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Each source has the share of the rows that is given, which may change over the run."""

    name: Literal["weights"] = "weights"
    weights: tuple[str, ...] = setting(
        (),
        "NAME=SHARE of each source, 1 in all; or NAME=SHARE@SPAN..SHARE@SPAN, with straight lines between",
    )
    epochs: tuple[str, ...] = setting((), EPOCHS)

    @property
    def points(self) -> dict[str, tuple[Point, ...]]:
        """The weights of each source, by where they hold. Raises ValueError where one cannot be read."""
        return {name: _points(text) for name, text in entries(self.weights).items()}


Mixture = Temperature | Weights


def entries(given: Sequence[str]) -> dict[str, str]:
    """NAME=TEXT by name; what has no name has an empty one."""
    pairs = (entry.partition("=") for entry in given)
    return {name if equals else "": text for name, equals, text in pairs}


def caps(mixture: Mixture) -> dict[str, float]:
    """The most epochs of each source that has a most. Raises ValueError where one cannot be read."""
    return {name: _number(text) for name, text in entries(mixture.epochs).items()}


def problems(mixture: Mixture, sources: Sequence[str]) -> Problems:
    """What is wrong with a mixture of these sources, none where `data.train` names none: (setting, why, fix)."""
    if not sources:
        if mixture != Temperature():
            yield (
                "train",
                "data.mixture is of sources with names, and there are none here",
                "jaxlm config explain data.train",
            )
        return
    yield from _misnamed("epochs", mixture.epochs, sources)
    if isinstance(mixture, Weights):
        yield from _misnamed("weights", mixture.weights, sources)
        lacking = [name for name in sources if name not in entries(mixture.weights)]
        if lacking:
            yield (
                "mixture.weights",
                f"{' and '.join(lacking)} of data.train {'have' if len(lacking) > 1 else 'has'} no weight",
                _flag("weights", _scaled(dict.fromkeys(sources, 1.0))),
            )


def misfits(mixture: Mixture, row_at: Callable[[Span], int], total: int) -> Problems:
    """What is wrong with weights over a run of `total` rows; `row_at` says where in it a span ends."""
    if not isinstance(mixture, Weights) or not mixture.weights:
        return
    known = mixture.points
    for name, points in known.items():
        if any(span.unit == "second" for span, _ in points):
            yield (
                "mixture.weights",
                f"the weights of {name} cannot change with time",
                _shares(known),
            )
            return
        at = [row_at(span) for span, _ in points]
        if any(b <= a for a, b in itertools.pairwise(at)):
            yield (
                "mixture.weights",
                f"the spans of {name} do not follow each other: rows {', '.join(map(str, at))} of {total}",
                _shares(known),
            )
            return
    for row, span in sorted({(row_at(s), str(s)) for points in known.values() for s, _ in points}):
        weights = {name: weight_at(points, row, row_at) for name, points in known.items()}
        if not abs(sum(weights.values()) - 1) <= SLACK:
            yield (
                "mixture.weights",
                f"at {span} they are {', '.join(f'{name} {w:g}' for name, w in weights.items())}, "
                f"{sum(weights.values()):g} in all, and must be 1",
                _shares(known),
            )
            return


def weight_at(points: Sequence[Point], row: float, row_at: Callable[[Span], int]) -> float:
    """The weight of a source at a row: constant before its first point and after its last."""
    known = [(row_at(span), weight) for span, weight in points]
    for (low, left), (high, right) in itertools.pairwise(known):
        if low <= row <= high:
            return left + (right - left) * (row - low) / (high - low)
    return known[0][1] if row < known[0][0] else known[-1][1]


def spans(mixture: Mixture) -> list[Span]:
    """Where weights change."""
    if not isinstance(mixture, Weights):
        return []
    moving = [points for points in mixture.points.values() if len(points) > 1]
    return [span for points in moving for span, _ in points]


def _points(text: str) -> tuple[Point, ...]:
    if re.fullmatch(_NUMBER, text):
        return ((Span.parse(0), _number(text)),)
    found = []
    for part in text.split(".."):
        if (match := _POINT.fullmatch(part)) is None:
            raise ValueError(f"{text!r} is neither a share nor SHARE@SPAN..SHARE@SPAN")
        found.append((Span.parse(match[2]), _number(match[1])))
    return tuple(found)


def _number(text: str) -> float:
    if not re.fullmatch(_NUMBER, text) or not math.isfinite(float(text)):
        raise ValueError(f"{text!r} is no number from 0 on")
    return float(text)


def _misnamed(field: str, given: Sequence[str], sources: Sequence[str]) -> Problems:
    """Entries that name no source, name one twice, or cannot be read."""
    names = [entry.partition("=")[0] if "=" in entry else "" for entry in given]
    for name, entry in zip(names, given, strict=True):
        _, _, text = entry.partition("=")
        if name not in sources:
            meant = nearest(name, sources)
            told = {meant or sources[0]: text or "1"}
            yield (
                f"mixture.{field}",
                f"{entry!r} names no source; there is {', '.join(sources)}",
                _flag(field, entries([e for e in given if e != entry]) | told),
            )
            return
        if names.count(name) > 1:
            yield f"mixture.{field}", f"{name} is named twice", _flag(field, entries(given))
            return
        try:
            if field == "weights":
                _points(text)
            elif _number(text) == 0:
                raise ValueError("0 epochs of a source are none; leave it out of data.train")
        except ValueError as error:
            even = _scaled(dict.fromkeys(sources, 1.0))
            mended = even if field == "weights" else entries(given) | {name: "1"}
            yield f"mixture.{field}", f"{name}: {error}", _flag(field, mended)
            return


def _flag(field: str, by_name: Mapping[str, str]) -> str:
    shown = ",".join(f"{name}={text}" for name, text in by_name.items())
    return f"--config.data.mixture.{field}={shown}"


def _shares(known: Mapping[str, Sequence[Point]]) -> str:
    """Constant weights that sum to 1, in proportion to the first of each."""
    first = {name: points[0][1] for name, points in known.items()}
    return _flag("weights", _scaled(first if any(first.values()) else dict.fromkeys(first, 1.0)))


def _scaled(weights: Mapping[str, float]) -> dict[str, str]:
    """In four digits and with a sum of 1: the last takes what rounding leaves."""
    total = sum(weights.values())
    shares = [round(weight / total, 4) for weight in weights.values()]
    shares[-1] = round(1 - sum(shares[:-1]), 4)
    return {name: f"{share:g}" for name, share in zip(weights, shares, strict=True)}
