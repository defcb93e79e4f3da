"""Plots of a run from its metrics.jsonl, and of scaling laws and learning-rate tests."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlm.monitor import layer_maps, sinks
from jaxlm.monitor.layer_maps import LayerMap


def new_figure(**texts: str) -> tuple[Any, Any]:
    """Return a new figure and its axes with a title and labels."""
    # Without pyplot: no global state, and no window system is looked for.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set(**texts)
    return figure, axes


def to_png(figure: Any) -> bytes:
    """Return the figure as a PNG; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _map_png(each: LayerMap) -> bytes:
    figure, axes = new_figure(title=each.title, xlabel="step", ylabel="layer")
    image = axes.imshow(each.grid, aspect="auto", origin="lower", interpolation="nearest")
    columns = np.unique(np.linspace(0, len(each.steps) - 1, 8).astype(int))
    rows = np.unique(np.linspace(0, len(each.layers) - 1, 10).astype(int))
    axes.set_xticks(columns, [str(each.steps[column]) for column in columns])
    axes.set_yticks(rows, [str(each.layers[row]) for row in rows])
    figure.colorbar(image, label="power of ten" if each.is_log else None)
    return to_png(figure)


class Plot(NamedTuple):
    """A curve in plots/: field, title, scale, and whether all splits are drawn."""

    name: str
    title: str
    field: str
    label: str
    scale: str = "linear"
    every_split: bool = False


PLOTS = (
    Plot("loss", "Loss", "loss_nats", "nats per token", every_split=True),
    Plot("learning_rate", "Learning rate", "learning_rate", "learning rate"),
    Plot("grad_norm", "Gradient norm, before clipping", "grad_norm", "global norm", scale="log"),
    Plot("throughput", "Throughput", "tokens_per_second", "tokens per second"),
    Plot("noise_scale", "Noise scale of the gradient", "noise_scale_tokens", "tokens", scale="log"),
)


def draw(run: str | os.PathLike[str]) -> list[Path]:
    """Draw the plots that have numbers; return their paths. Raises DataError, NotWritable."""
    folder, records = Path(run) / "plots", sinks.read(Path(run) / "metrics.jsonl")
    curves = ((plot, _series(records, plot)) for plot in PLOTS)
    pictures = {plot.name: _png(plot, series) for plot, series in curves if series}
    pictures |= {each.name: _map_png(each) for each in layer_maps.every(records)}
    for name, picture in pictures.items():
        folder.mkdir(exist_ok=True)
        sinks.replace(folder / f"{name}.png", picture)
    return [folder / f"{name}.png" for name in pictures]


def _series(records: Sequence[dict[str, Any]], plot: Plot) -> dict[str, list[tuple[int, float]]]:
    """Return the points by split; numbers that were not finite are left out."""
    out: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        split, value = record.get("split", "train"), record.get(plot.field)
        if value is not None and (plot.every_split or split == "train"):
            out.setdefault(split, []).append((record["step"], value))
    return out


def learning_rate_png(points: Sequence[tuple[int, float]]) -> bytes:
    """Return a PNG of the planned learning rate by step, in the style of the run's own plot."""
    (plot,) = (plot for plot in PLOTS if plot.name == "learning_rate")
    return _png(plot, {"train": list(points)})


def lr_find_png(curve: Sequence[tuple[float, float, float]], suggested: float | None) -> bytes:
    """Return a PNG of a learning-rate range test: (rate, loss, smoothed loss) of each step."""
    title = "Learning-rate range test"
    figure, axes = new_figure(title=title, xlabel="learning rate", ylabel="nats per token")
    rate, loss, smoothed = zip(*curve, strict=True)
    axes.plot(rate, loss, ".", alpha=0.35, label="loss")
    axes.plot(rate, smoothed, "-", linewidth=1.4, label="smoothed")
    if suggested is not None:
        axes.axvline(suggested, color="0.4", linestyle="--", linewidth=1, label=f"{suggested:.2g}")
    axes.set_xscale("log")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return to_png(figure)


Points = Sequence[tuple[float, float]]


class Size(NamedTuple):
    """Runs of one model size and the fitted curve, each as points (FLOPs, loss)."""

    name: str
    runs: Points
    curve: Points


def scaling(
    sizes: Sequence[Size], best: Points, spent: tuple[float, float, Sequence[float]]
) -> bytes:
    """Return a PNG of losses by FLOPs; `spent` is a budget, its loss and the loss's interval."""
    title = "Loss by training FLOPs"
    figure, axes = new_figure(title=title, xlabel="FLOPs", ylabel="nats per token")
    for size in sizes:
        (line,) = axes.plot(*zip(*size.curve, strict=True), "-", linewidth=0.9, alpha=0.6)
        axes.plot(*zip(*size.runs, strict=True), "o", c=line.get_color(), ms=4, label=size.name)
    axes.plot(*zip(*best, strict=True), "--", color="0.3", linewidth=1.2, label="lowest")
    budget, loss, (low, high) = spent
    reach = [[max(loss - low, 0)], [max(high - loss, 0)]]
    axes.errorbar([budget], [loss], yerr=reach, fmt="*", color="0.1", capsize=3, label="budget")
    axes.set_xscale("log")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small")
    return to_png(figure)


def _png(plot: Plot, series: dict[str, list[tuple[int, float]]]) -> bytes:
    figure, axes = new_figure(title=plot.title, xlabel="step", ylabel=plot.label)
    for split, points in series.items():
        steps, values = zip(*points, strict=True)
        mark = "o-" if split != "train" else "." if len(points) == 1 else "-"
        axes.plot(steps, values, mark, label=split, linewidth=1.2, markersize=3.5)
    if plot.scale == "log" and min(v for points in series.values() for _, v in points) > 0:
        axes.set_yscale("log")
    axes.grid(alpha=0.25)
    if len(series) > 1:
        axes.legend(frameon=False)
    return to_png(figure)
