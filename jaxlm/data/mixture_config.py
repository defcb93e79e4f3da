"""Settings of a mixture: the share of rows of each training source.

Example:
  >>> mixture = MixtureWeights(weights=("web=0.75", "code=0.25@0%..0.5@100%"))
  >>> weight_at(mixture.points["code"], 50, lambda span: int(100 * span.amount))
  0.375
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from jaxlm.core.config import Span, setting
from jaxlm.core.nearest import nearest_word

EPOCHS = (
    "NAME=EPOCHS: maximum epochs of a source; then the others take its share, in proportion to "
    "their weights"
)
SLACK = 1e-6  # tolerance of a sum of weights
_NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_POINT = re.compile(rf"({_NUMBER})@(.+)")

Problems = Iterator[tuple[str, str, str]]
Point = tuple[Span, float]  # a point of the run, and the weight there


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temperature:
    """Weights by size: n^(1 / temperature) for a source of n tokens, or of n prompts."""

    name: Literal["temperature"] = "temperature"
    temperature: float = setting(
        1.0, "1 is in proportion to size; larger is closer to uniform", above=0
    )
    epochs: tuple[str, ...] = setting((), EPOCHS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureWeights:
    """Explicit share of the rows for each source, which may change over the run."""

    name: Literal["weights"] = "weights"
    weights: tuple[str, ...] = setting(
        (),
        "NAME=SHARE of each source, with the sum 1; or NAME=SHARE@SPAN..SHARE@SPAN, linear "
        "between points",
    )
    epochs: tuple[str, ...] = setting((), EPOCHS)

    @property
    def points(self) -> dict[str, tuple[Point, ...]]:
        """Points of each source's weight. Raises ValueError if one cannot be parsed."""
        return {name: _points(text) for name, text in entries(self.weights).items()}


MixtureConfig = Temperature | MixtureWeights


def entries(texts: Sequence[str]) -> dict[str, str]:
    """Return TEXT by NAME of entries NAME=TEXT; the name is empty without a "="."""
    pairs = (entry.partition("=") for entry in texts)
    return {name if equals else "": text for name, equals, text in pairs}


def max_epochs(mixture: MixtureConfig) -> dict[str, float]:
    """Return the maximum epochs of sources that have one. Raise ValueError if one is invalid."""
    return {name: _number(text) for name, text in entries(mixture.epochs).items()}


def problems(mixture: MixtureConfig, sources: Sequence[str]) -> Problems:
    """Yield (setting, why, fix) for an invalid mixture of the named `sources`."""
    if not sources:
        if mixture != Temperature():
            why = "data.mixture needs named sources in data.train"
            yield "train", why, "jaxlm config explain data.train"
        return
    yield from _misnamed("epochs", mixture.epochs, sources)
    if isinstance(mixture, MixtureWeights):
        yield from _misnamed("weights", mixture.weights, sources)
        lacking = [name for name in sources if name not in entries(mixture.weights)]
        if lacking:
            why = (
                f"{' and '.join(lacking)} of data.train {'have' if len(lacking) > 1 else 'has'} no "
                "weight"
            )
            yield "mixture.weights", why, _flag("weights", _scaled(dict.fromkeys(sources, 1.0)))


def run_problems(mixture: MixtureConfig, row_at: Callable[[Span], int], total: int) -> Problems:
    """Yield (setting, why, fix) if weights do not fit a run of `total` rows.

    `row_at` returns the row at which a span ends.
    """
    if not isinstance(mixture, MixtureWeights) or not mixture.weights:
        return
    known = mixture.points
    for name, points in known.items():
        if any(span.unit == "second" for span, _ in points):
            why = f"the weights of {name} cannot change with time"
            yield "mixture.weights", why, _shares(known)
            return
        ends = [row_at(span) for span, _ in points]
        if any(b <= a for a, b in itertools.pairwise(ends)):
            why = (
                f"the spans of {name} are not in order: rows {', '.join(map(str, ends))} of {total}"
            )
            yield "mixture.weights", why, _shares(known)
            return
    for row, span in sorted({(row_at(s), str(s)) for points in known.values() for s, _ in points}):
        weights = {name: weight_at(points, row, row_at) for name, points in known.items()}
        if not abs(sum(weights.values()) - 1) <= SLACK:
            why = (
                f"at {span} the weights "
                f"{', '.join(f'{name} {w:g}' for name, w in weights.items())} have the sum "
                f"{sum(weights.values()):g}, which must be 1"
            )
            yield "mixture.weights", why, _shares(known)
            return


def weight_at(points: Sequence[Point], row: float, row_at: Callable[[Span], int]) -> float:
    """Return the weight of a source at a row: linear between points, constant outside."""
    known = [(row_at(span), weight) for span, weight in points]
    for (low, left), (high, right) in itertools.pairwise(known):
        if low <= row <= high:
            return left + (right - left) * (row - low) / (high - low)
    return known[0][1] if row < known[0][0] else known[-1][1]


def change_spans(mixture: MixtureConfig) -> list[Span]:
    """Return the spans at which weights change."""
    if not isinstance(mixture, MixtureWeights):
        return []
    moving = [points for points in mixture.points.values() if len(points) > 1]
    return [span for points in moving for span, _ in points]


def _points(text: str) -> tuple[Point, ...]:
    if re.fullmatch(_NUMBER, text):
        return ((Span.parse(0), _number(text)),)
    points = []
    for part in text.split(".."):
        if (match := _POINT.fullmatch(part)) is None:
            raise ValueError(f"{text!r} is not a share or SHARE@SPAN..SHARE@SPAN")
        points.append((Span.parse(match[2]), _number(match[1])))
    return tuple(points)


def _number(text: str) -> float:
    if not re.fullmatch(_NUMBER, text) or not math.isfinite(float(text)):
        raise ValueError(f"{text!r} is not a number of at least 0")
    return float(text)


def _misnamed(field: str, texts: Sequence[str], sources: Sequence[str]) -> Problems:
    """Yield a problem if an entry names no source, repeats one, or cannot be parsed."""
    names = [entry.partition("=")[0] if "=" in entry else "" for entry in texts]
    for name, entry in zip(names, texts, strict=True):
        _, _, text = entry.partition("=")
        if name not in sources:
            left = [each for each in sources if each not in names] or sources
            change = {nearest_word(name, left) or left[0]: text or "1"}
            why = f"{entry!r} names no source; there is {', '.join(sources)}"
            fix = _flag(field, entries([e for e in texts if e != entry]) | change)
            yield f"mixture.{field}", why, fix
            return
        if names.count(name) > 1:
            yield f"mixture.{field}", f"{name} is named twice", _flag(field, entries(texts))
            return
        try:
            if field == "weights":
                _points(text)
            elif _number(text) == 0:
                raise ValueError("0 epochs read nothing of a source; leave it out of data.train")
        except ValueError as error:
            even = _scaled(dict.fromkeys(sources, 1.0))
            mended = even if field == "weights" else entries(texts) | {name: "1"}
            yield f"mixture.{field}", f"{name}: {error}", _flag(field, mended)
            return


def _flag(field: str, by_name: Mapping[str, str]) -> str:
    shown = ",".join(f"{name}={text}" for name, text in by_name.items())
    return f"--config.data.mixture.{field}={shown}"


def _shares(known: Mapping[str, Sequence[Point]]) -> str:
    """Return the flag of constant weights, in proportion to the first of each source."""
    first = {name: points[0][1] for name, points in known.items()}
    return _flag("weights", _scaled(first if any(first.values()) else dict.fromkeys(first, 1.0)))


def _scaled(weights: Mapping[str, float]) -> dict[str, str]:
    """Scale weights to the sum 1, in four digits; the last takes the rounding error."""
    total = sum(weights.values())
    shares = [round(weight / total, 4) for weight in weights.values()]
    shares[-1] = round(1 - sum(shares[:-1]), 4)
    return {name: f"{share:g}" for name, share in zip(weights, shares, strict=True)}
