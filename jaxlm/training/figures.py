"""Figures of layers, from what a step observed to numbers with names."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxlm.core.tree import LayerIndex, layer_indices
from jaxlm.training.gradient import SQUARE
from jaxlm.training.observe import Observed


def by_layer(found: Observed) -> dict[str, float]:
    """A record's `layers/...`, of arrays on the host.

    - `layers/3/mlp/up/weight/grad_norm`, `param_norm`, `update_norm` of each parameter, and without the parameter's name
      those of the whole layer; the gradient is the mean one before clipping, the update what the optimizer made of it.
    - `stream_rms`, `attention_out_rms`, `mlp_out_rms`: root mean squares over the tokens that are not padding, of the
      stream after the layer and of what each part adds, before dropout.
    - `dead_units`: the share of the MLP's units that no token of the batch brought above zero before the activation.
    - `expert_load/0`: what an expert was sent, over an even share of it.
    - `attention_entropy` in nats, the mean over heads and queries, and `attention_entropy_min`, the least of a head;
      `attention_logit_max`, the largest score before the softmax, and before a cap.

    Layers are counted from 0, those of a prefix first; what is in no layer keeps its path.
    """
    every = (*found.norms.values(), found.notes.sums, found.notes.peaks)
    sizes = {
        path: len(values) for leaves in every for path, values in leaves.items() if np.ndim(values)
    }
    stacked = layer_indices(sizes)
    record: dict[str, float] = {}
    for name, leaves in found.norms.items():
        squares: dict[str, float] = {}
        for path, values in leaves.items():
            for place, part, value in _layers(path, values, stacked):
                record[f"layers/{place}/{part}/{name}" if part else f"layers/{place}/{name}"] = (
                    float(value)
                )
                if part:
                    squares[place] = squares.get(place, 0.0) + float(value) ** 2
        record |= {f"layers/{place}/{name}": total**0.5 for place, total in squares.items()}
    noted: dict[str, dict[str, Any]] = {}
    for path, values in [*found.notes.sums.items(), *found.notes.peaks.items()]:
        if path != SQUARE:
            for place, part, value in _layers(path, values, stacked):
                noted.setdefault(place, {})[part] = np.asarray(value, np.float64)
    for place, notes in noted.items():
        record |= {f"layers/{place}/{name}": value for name, value in _noted(notes)}
    return record


def _noted(notes: Mapping[str, Any]) -> list[tuple[str, float]]:
    figures = [
        (f"{part}_rms", float(np.sqrt(notes[f"{part}_square"] / max(notes["tokens"], 1.0))))
        for part in ("stream", "attention_out", "mlp_out")
        if f"{part}_square" in notes
    ]
    if "active" in notes:
        figures.append(("dead_units", float((notes["active"] == 0).mean())))
    if "load" in notes:
        even = max(notes["load"].mean(), 1e-30)
        figures += [(f"expert_load/{e}", float(x / even)) for e, x in enumerate(notes["load"])]
    if "entropy" in notes:
        heads = notes["entropy"] / max(notes["queries"], 1.0)
        figures += [
            ("attention_entropy", float(heads.mean())),
            ("attention_entropy_min", float(heads.min())),
        ]
    if "logit_max" in notes:
        figures.append(("attention_logit_max", float(notes["logit_max"].max())))
    return figures


class Noise(NamedTuple):
    """Estimates of |G|^2 and tr(S), of the true gradient G and of the covariance S of one token's."""

    square: float
    trace: float


def noise(found: Observed, parts: int) -> Noise:
    """From the squared norm of the batch's gradient and the mean one of its `parts` micro-batches.

        |G|^2 = (W |g_W|^2 - w |g_w|^2) / (W - w),  tr(S) = (|g_w|^2 - |g_W|^2) / (1/w - 1/W)

    with the tokens W of the batch and w = W / parts of each part. Both are unbiased and noisy: their means over many
    steps are what is divided, tr(S) / |G|^2, the batch in tokens at which noise and gradient are as large.

    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.
    """
    whole = float(found.weight)
    part = whole / parts
    big, small = float(found.square), float(found.notes.sums[SQUARE]) / parts
    return Noise(
        (whole * big - part * small) / (whole - part), (small - big) / (1 / part - 1 / whole)
    )


def _layers(path: str, values: Any, found: Mapping[str, LayerIndex]) -> list[tuple[str, str, Any]]:
    """(layer, part of it, value) of each layer; a value of no layer has its path and no part."""
    if path not in found:
        return [(path, "", values)]
    stack, numbers, part = found[path]
    named = [f"{stack}/{number}" if stack else str(number) for number in numbers]
    return [(name, part, value) for name, value in zip(named, values, strict=True)]
