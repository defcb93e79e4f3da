"""Heat maps of the figures that `log.layers` writes: a row for each layer, a column for each step.

`render` returns an SVG in the colors of the page's theme, with the value of each cell on hover, for
reports without other files. `plots.draw` makes pictures of the same maps.
"""

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxlm.monitor import sinks
from jaxlm.monitor.charts import brief

COLUMNS, ROWS = 32, 16  # of a drawing at most; those between are left out
WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 6, 24  # space around the cells
LABELS = 6  # of an axis at most
FAINTEST = 0.15  # opacity of the lowest value; without a value there is no cell
_FIGURE = re.compile(r"layers/(\d{1,5})/(\w+)")


class LayerFigure(NamedTuple):
    """A figure of each layer, or its ratio to another, maybe as the power of ten."""

    name: str
    title: str
    field: str
    over: str = ""
    is_log: bool = True


FIGURES = (
    LayerFigure("layers_grad_norm", "Gradient norm by layer", "grad_norm"),
    LayerFigure(
        "layers_update_ratio", "Update over parameters by layer", "update_norm", "param_norm"
    ),
    LayerFigure("layers_stream", "Size of the stream after each layer", "stream_rms"),
    LayerFigure("layers_dead_units", "Share of dead units by layer", "dead_units", is_log=False),
    LayerFigure(
        "layers_entropy", "Attention entropy by layer, nats", "attention_entropy", is_log=False
    ),
    LayerFigure("layers_logit_max", "Largest attention logit by layer", "attention_logit_max"),
)


class LayerMap(NamedTuple):
    """The values of a figure: `grid[layer, step]`, with NaN for unknown."""

    name: str
    title: str
    steps: list[int]
    layers: list[int]
    grid: np.ndarray
    is_log: bool  # the values are powers of ten


def every(records: Iterable[Mapping[str, Any]]) -> list[LayerMap]:
    """Return the maps that have numbers."""
    seen = [(record["step"], _by_layer(record)) for record in records]
    watched = [(step, layers) for step, layers in seen if layers]
    maps = (_map(each, watched) for each in FIGURES)
    return [each for each in maps if np.isfinite(each.grid).any()]


def _by_layer(record: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    layers: dict[int, dict[str, float]] = {}
    for name, value in record.items():
        match = _FIGURE.fullmatch(name)
        if match and sinks.is_number(value):
            layers.setdefault(int(match[1]), {})[match[2]] = value
    return layers


def _map(each: LayerFigure, watched: Sequence[tuple[int, dict[int, dict[str, float]]]]) -> LayerMap:
    layers = sorted({number for _, figures in watched for number in figures})

    def value(figures: Mapping[str, float]) -> float:
        below = figures.get(each.over, 0.0) if each.over else 1.0
        ratio = figures.get(each.field, math.nan) / below if below else math.nan
        return ratio if not each.is_log else math.log10(ratio) if ratio > 0 else math.nan

    rows = [[value(figures.get(number, {})) for _, figures in watched] for number in layers]
    steps = [step for step, _ in watched]
    return LayerMap(each.name, each.title, steps, layers, np.array(rows, float), each.is_log)


def render(each: LayerMap) -> str:
    """Return the figure of a map as HTML. The first layer is at the bottom."""
    columns, rows = _spread(len(each.steps), COLUMNS), _spread(len(each.layers), ROWS)[::-1]
    low, high = float(np.nanmin(each.grid)), float(np.nanmax(each.grid))
    cells = []
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            value = each.grid[row, column]
            if math.isfinite(value):
                share = (value - low) / (high - low) if high > low else 0.5
                opacity = FAINTEST + (1 - FAINTEST) * share
                cells.append(
                    f'<rect x="{x}" y="{y}" width="1" height="1" fill-opacity="{opacity:.2g}">'
                    f"<title>step {each.steps[column]}, layer {each.layers[row]}: "
                    f"{_shown(each, value)}</title></rect>"
                )
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    texts = [
        f'<text class="x" x="{LEFT + (x + 0.5) / len(columns) * width:.0f}" y="{HEIGHT - 6}">'
        f"{brief(each.steps[columns[x]])}</text>"
        for x in _spread(len(columns), LABELS)
    ] + [
        f'<text class="y" x="{LEFT - 6}" y="{TOP + (y + 0.5) / len(rows) * height + 4:.0f}">'
        f"{each.layers[rows[y]]}</text>"
        for y in _spread(len(rows), LABELS)
    ]
    title = html.escape(each.title)
    return (
        f'<figure class="map"><figcaption>{title} <small>by step</small></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}, by step">'
        f'<svg x="{LEFT}" y="{TOP}" width="{width}" height="{height}" preserveAspectRatio="none" '
        f'viewBox="0 0 {len(columns)} {len(rows)}">{"".join(cells)}</svg>'
        f'<path class="frame" d="M{LEFT} {TOP}h{width}v{height}h-{width}z"/>{"".join(texts)}</svg>'
        f'<div class="scale">{_shown(each, low)}<i></i>{_shown(each, high)}</div></figure>'
    )


def _shown(each: LayerMap, value: float) -> str:
    return brief(10**value if each.is_log else value)


def _spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the indices below `count`, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int)).tolist()
