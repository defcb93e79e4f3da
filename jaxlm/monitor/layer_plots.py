"""Pictures of layers: what `log.layers` wrote, as maps of layer by step."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxlm.monitor import canvas, sinks

_LAYER = re.compile(r"layers/(\d{1,5})/(\w+)")


class Map(NamedTuple):
    """A file of plots/: the figure of a layer, or its quotient by another, under a title; colours by its logarithm or itself."""

    name: str
    title: str
    field: str
    over: str = ""
    is_log: bool = True


MAPS = (
    Map("layers_grad_norm", "Gradient norm by layer", "grad_norm"),
    Map("layers_update_ratio", "Update over parameters by layer", "update_norm", "param_norm"),
    Map("layers_stream", "Size of the stream after each layer", "stream_rms"),
    Map("layers_dead_units", "Share of dead units by layer", "dead_units", is_log=False),
    Map("layers_entropy", "Attention entropy by layer, nats", "attention_entropy", is_log=False),
    Map("layers_logit_max", "Largest attention logit by layer", "attention_logit_max"),
)


def layer_maps(records: Iterable[Mapping[str, Any]]) -> dict[str, bytes]:
    """PNGs by the name of their map; those that there are numbers for."""
    seen = [(record["step"], _by_layer(record)) for record in records]
    watched = [(step, layers) for step, layers in seen if layers]
    out = {}
    for each in MAPS:
        found = _values(each, watched)
        if found is not None:
            out[each.name] = _map_png(each, *found)
    return out


def _by_layer(record: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    layers: dict[int, dict[str, float]] = {}
    for name, value in record.items():
        match = _LAYER.fullmatch(name)
        if match and sinks.is_number(value):
            layers.setdefault(int(match[1]), {})[match[2]] = value
    return layers


def _values(
    each: Map, watched: Sequence[tuple[int, dict[int, dict[str, float]]]]
) -> tuple[list[int], list[int], np.ndarray] | None:
    """Steps, layers and a map of both; a number that is unknown is NaN. None where all are."""
    steps = [step for step, _ in watched]
    layers = sorted({number for _, found in watched for number in found})
    grid = np.full((len(layers), len(steps)), np.nan)
    for column, (_, found) in enumerate(watched):
        for row, number in enumerate(layers):
            figures = found.get(number, {})
            value = figures.get(each.field, math.nan)
            if each.over:
                below = figures.get(each.over, 0.0)
                value = value / below if below else math.nan
            if each.is_log:
                value = math.log10(value) if value > 0 else math.nan
            grid[row, column] = value
    return (steps, layers, grid) if np.isfinite(grid).any() else None


def _map_png(each: Map, steps: list[int], layers: list[int], grid: np.ndarray) -> bytes:
    figure, axes = canvas.new_figure()
    image = axes.imshow(grid, aspect="auto", origin="lower", interpolation="nearest")
    columns = np.unique(np.linspace(0, len(steps) - 1, 8).astype(int))
    rows = np.unique(np.linspace(0, len(layers) - 1, 10).astype(int))
    axes.set_xticks(columns, [str(steps[column]) for column in columns])
    axes.set_yticks(rows, [str(layers[row]) for row in rows])
    axes.set(title=each.title, xlabel="step", ylabel="layer")
    figure.colorbar(image, label="power of ten" if each.is_log else None)
    return canvas.to_png(figure)
