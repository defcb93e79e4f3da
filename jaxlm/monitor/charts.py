"""Line charts as SVG, for pages of HTML that need no other file.

Each chart is drawn here over steps, for a reader without scripts. `charts.js` draws it again from
the same data: over steps, tokens or seconds, with smoothing, and with the values on hover. Colors
are those of the page's theme, by the class of a series, `s0` to `s7`.
"""

import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.monitor import sinks
from jaxlm.monitor.sinks import Record

SCRIPT = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
AXES = ("steps", "tokens", "seconds")
MAX_POINTS = 400  # of a series
COLORS = 8
WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 30  # space around the curves


class Series(NamedTuple):
    """A curve: points of (steps, tokens, seconds, value).

    Args:
      name: name in the legend.
      points: the points, by rising steps.
      color: number of its color.
      is_marked: draws the points, as those of evaluations; others can be smoothed.
      is_thin: draws the curve thin and leaves it out of the legend.
    """

    name: str
    points: Sequence[tuple[float, ...]]
    color: int = 0
    is_marked: bool = False
    is_thin: bool = False


class Chart(NamedTuple):
    """A chart of some series.

    Args:
      title: title above the chart.
      unit: unit of the values.
      series: the curves.
      is_log: the values have a logarithmic scale.
      levels: horizontal lines, such as those of coders without a model.
      mark: index of the series whose lowest point is marked; None for none.
      axis: what the first number of a point counts.
    """

    title: str
    unit: str
    series: Sequence[Series]
    is_log: bool = False
    levels: Sequence[tuple[str, float]] = ()
    mark: int | None = None
    axis: str = "step"


def costs(records: Sequence[Record]) -> list[tuple[int, float, float]]:
    """Return (steps, tokens, seconds) at the start and at each logged step, by rising steps.

    Seconds are those of the steps alone: without compilation, evaluation and the time between two
    starts.
    """
    result = [(0, 0.0, 0.0)]
    logged = {each["step"]: each for each in records if each.get("split") == "train"}
    for step, record in sorted(logged.items()):
        before, tokens, seconds = result[-1]
        duration = record.get("step_seconds")
        seconds += (step - before) * (duration if sinks.is_number(duration) else 0.0)
        result.append((step, record.get("tokens") or tokens, seconds))
    return result


def points(records: Sequence[Record], split: str, field: str) -> list[tuple[float, ...]]:
    """Return the points of a field of a split; tokens and seconds are interpolated."""
    import numpy as np

    steps, tokens, seconds = zip(*costs(records), strict=True)
    values = {
        record["step"]: record[field]
        for record in records
        if record.get("split", "train") == split and sinks.is_number(record.get(field))
    }
    at = sorted(values)
    columns = (np.interp(at, steps, tokens).tolist(), np.interp(at, steps, seconds).tolist())
    return list(zip(at, *columns, (values[step] for step in at), strict=True))


def thinned(points: Sequence[Any], most: int = MAX_POINTS) -> list[Any]:
    """Return at most about `most` points: the lowest and highest of each interval, and the ends."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    chosen = {0, len(points) - 1}
    for start in range(0, len(points), size):
        part = range(start, min(start + size, len(points)))
        chosen |= {min(part, key=lambda i: points[i][3]), max(part, key=lambda i: points[i][3])}
    return [points[index] for index in sorted(chosen)]


def render(chart: Chart) -> str:
    """Return the figure of a chart as HTML."""
    shown = [each._replace(points=thinned(each.points)) for each in chart.series if each.points]
    values = [point[3] for each in shown for point in each.points]
    is_log = chart.is_log and min(values, default=0) > 0
    data = {
        "unit": chart.unit,
        "axis": chart.axis,
        "log": is_log,
        "mark": chart.mark,
        "levels": [[name, _rounded(value)] for name, value in chart.levels],
        "series": [
            {
                "name": each.name,
                "color": each.color % COLORS,
                "marked": each.is_marked,
                "thin": each.is_thin,
                "x": [[_rounded(point[axis]) for point in each.points] for axis in range(3)],
                "y": [_rounded(point[3]) for point in each.points],
            }
            for each in shown
        ],
    }
    legend = "".join(
        f'<li class="s{each.color % COLORS}">{html.escape(each.name)}</li>'
        for each in shown
        if not each.is_thin and len(shown) > 1
    )
    text = html.escape(json.dumps(data, separators=(",", ":"), allow_nan=False))
    title = html.escape(chart.title)
    return (
        f'<figure class="chart" data-chart="{text}"><figcaption>{title} '
        f"<small>{html.escape(chart.unit)}</small></figcaption>{_svg(chart, shown, is_log=is_log)}"
        f'<output hidden></output><ul class="legend">{legend}</ul></figure>'
    )


def bounds(chart: Chart, series: Sequence[Series]) -> tuple[float, float]:
    """Return the lowest and the highest value to draw: levels far from the curves are left out."""
    values = [point[3] for each in series for point in each.points]
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    reach = high - low or abs(high) or 1.0
    near = [value for _, value in chart.levels if low - reach < value < high + reach]
    return min([low, *near]), max([high, *near])


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round values from low to high."""
    span = (high - low) / most or 1.0
    power = 10.0 ** math.floor(math.log10(span))
    step = power * next(each for each in (1, 2, 5, 10) if each * power >= span * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def brief(value: float) -> str:
    """Return a short number: 1.2k, 3M, 0.05, 2e-05."""
    size = abs(value)
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"


def _svg(chart: Chart, series: Sequence[Series], *, is_log: bool) -> str:
    """Return the drawing over steps, without smoothing."""
    scale = math.log10 if is_log else float
    low, high = map(scale, bounds(chart, series))
    if low == high:
        low, high = low - (abs(low) or 1) / 10, high + (abs(high) or 1) / 10
    margin = 0.05 * (high - low)
    low, high = low - margin, high + margin
    last = max((each.points[-1][0] for each in series), default=1) or 1

    def x(step: float) -> float:
        return LEFT + step / last * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (scale(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts, labels = [], []
    if is_log and high - low > 1:
        shown = [10**tick for tick in ticks(low, high)]
    else:
        shown = ticks(10**low, 10**high) if is_log else ticks(low, high)
    for value in shown:
        parts.append(f'<path class="grid" d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{y(value) + 4:.1f}">{brief(value)}</text>')
    for tick in ticks(0, last):
        parts.append(f'<text class="x" x="{x(tick):.1f}" y="{HEIGHT - 8}">{brief(tick)}</text>')
    above, end = -99.0, WIDTH - RIGHT
    for name, value in chart.levels:
        if low <= scale(value) <= high:
            is_near = abs(y(value) - above) < 14
            end = end - 8 * len(name) - 14 if is_near else WIDTH - RIGHT
            above = y(value)
            parts.append(f'<path class="level" d="M{LEFT} {above:.1f}H{WIDTH - RIGHT}"/>')
            place, label = f'x="{end}" y="{above + 4:.1f}"', html.escape(name)
            labels.append(f'<text class="level" {place}>{label}</text>')
    for each in series:
        kind = f"s{each.color % COLORS}" + (" thin" if each.is_thin else "")
        line = "L".join(f"{x(point[0]):.1f} {y(point[3]):.1f}" for point in each.points)
        parts.append(f'<path class="{kind}" d="M{line}"/>')
        if each.is_marked or len(each.points) == 1:
            dots = (
                f'<circle class="{kind}" cx="{x(p[0]):.1f}" cy="{y(p[3]):.1f}" r="2.5"/>'
                for p in each.points
            )
            parts.append("".join(dots))
    label = html.escape(f"{chart.title}, {chart.unit}, by {chart.axis}")
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg {size} role="img" aria-label="{label}">{"".join(parts + labels)}</svg>'


def _rounded(value: float) -> float | int:
    """Return a number with six digits."""
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def by_level(coders: Mapping[str, float], record: Record) -> list[tuple[str, float]]:
    """Return coders' bits per byte as nats per token, by an evaluation of the same text."""
    nats: Any = record.get("loss_nats")
    bits: Any = record.get("bits_per_byte")
    if not sinks.is_number(nats) or not sinks.is_number(bits) or not bits:
        return []
    return [(name, value * nats / bits) for name, value in coders.items()]
