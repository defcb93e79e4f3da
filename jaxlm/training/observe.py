"""Statistics of the layers in a step, without applying the step."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import Array

from jaxlm.core import tree
from jaxlm.core.tree import LayerIndex, layer_indices
from jaxlm.data.batch import Tokens
from jaxlm.monitor.config import Watched
from jaxlm.nn.intermediates import Intermediates, Kind
from jaxlm.training import gradient as gradients
from jaxlm.training.gradient import SQUARE, build_estimator
from jaxlm.training.state import TrainState
from jaxlm.training.step import StepSpec

KINDS: dict[Watched, tuple[Kind, ...]] = {
    "norms": (),
    "activations": ("activations",),
    "attention": ("entropy",),
    "noise": (),
}


class Observed(NamedTuple):
    """Statistics of one step."""

    # Norms by kind and by the path of a leaf, [L] for stacked layers.
    norms: dict[str, dict[str, Array]]
    notes: Intermediates  # intermediates of the layers
    square: Array
    weight: Array


Observe = Callable[..., Observed]  # of the state, the batch, and the rate (1)


def build_observer(spec: StepSpec, watched: Collection[Watched]) -> Observe:
    """Return the function (state, batch, rate) -> statistics of the step from that state.

    It is a program of its own and returns no state: a run that is observed computes the same bits
    as one that is not, by the same step program. It costs one more step whenever it is called.

    Args:
      spec: the step. If its micro-batches differ from the step's, dropout draws other numbers.
      watched: kinds of statistics.
    """
    estimate = build_estimator(spec.curvature, spec)
    optimizer = optax.with_extra_args_support(spec.optimizer)
    gradient = gradients.build_gradient(
        spec, capture=[kind for name in watched for kind in KINDS[name]], squares="noise" in watched
    )

    def observe(state: TrainState, batch: Tokens, rate: Array | float = 1.0) -> Observed:
        key, scale = jax.random.fold_in(spec.key, state.step), state.guard.scale.factor
        grads, part, captured = gradient(spec.point(state), batch, key, scale)
        norms: dict[str, dict[str, Array]] = {}
        if "norms" in watched:
            applied = state.applied
            estimated = estimate(state.params, grads, batch, key, scale, applied)
            updates, _ = optimizer.update(
                grads, state.opt_state, state.params, rate=rate, applied=applied, **estimated
            )
            trees = {"grad_norm": grads, "param_norm": state.params, "update_norm": updates}
            norms = {
                name: gradients.norms_by_layer(values, spec.axes) for name, values in trees.items()
            }
        return Observed(norms, captured, tree.norm(grads) ** 2, part.objective.weight)

    return observe


# Metrics of layers, computed on the host.


def layer_metrics(observed: Observed) -> dict[str, float]:
    """Return the `layers/...` metrics of a record, from arrays on the host.

    - `layers/3/mlp/up/weight/grad_norm`, `param_norm`, `update_norm` of each parameter, and of the
      whole layer without the parameter's name. The gradient is the mean before clipping; the update
      is the optimizer's result.
    - `stream_rms`, `attention_out_rms`, `mlp_out_rms`: root mean squares over the tokens that are
      not padding, of the residual stream after the layer and of each part's output, before dropout.
    - `dead_units`: the share of the MLP's units whose pre-activation is above zero for no token of
      the batch.
    - `expert_load/0`: the load of an expert over an even share of the load.
    - `attention_entropy` in nats, the mean over heads and queries, and `attention_entropy_min`, the
      lowest mean of a head; `attention_logit_max`, the largest score before softcap and softmax.

    Layers are counted from 0, those of a prefix first; a value outside the layers keeps its path.
    """
    every = (*observed.norms.values(), observed.notes.sums, observed.notes.peaks)
    sizes = {
        path: len(values) for leaves in every for path, values in leaves.items() if np.ndim(values)
    }
    stacked = layer_indices(sizes)
    record: dict[str, float] = {}
    for name, leaves in observed.norms.items():
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
    for path, values in [*observed.notes.sums.items(), *observed.notes.peaks.items()]:
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
    """Estimates of |G|^2 and tr(S): true gradient G, covariance S of one token's gradient."""

    square: float
    trace: float


def gradient_noise(observed: Observed, parts: int) -> Noise:
    """Estimate the gradient noise from a batch and its `parts` micro-batches.

    With the squared gradient norm |g_W|^2 of the batch and the mean one |g_w|^2 of the parts,

        |G|^2 = (W |g_W|^2 - w |g_w|^2) / (W - w),  tr(S) = (|g_w|^2 - |g_W|^2) / (1/w - 1/W)

    for the tokens W of the batch and w = W / parts of each part. Both are unbiased and noisy, so
    their means over many steps are divided: tr(S) / |G|^2 is the batch in tokens at which noise and
    gradient are equally large.

    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.
    """
    whole = float(observed.weight)
    part = whole / parts
    big, small = float(observed.square), float(observed.notes.sums[SQUARE]) / parts
    return Noise(
        (whole * big - part * small) / (whole - part), (small - big) / (1 / part - 1 / whole)
    )


def _layers(path: str, values: Any, index: Mapping[str, LayerIndex]) -> list[tuple[str, str, Any]]:
    """Return (layer, part, value) of each layer; outside the layers: (path, "", value)."""
    if path not in index:
        return [(path, "", values)]
    stack, numbers, part = index[path]
    named = [f"{stack}/{number}" if stack else str(number) for number in numbers]
    return [(name, part, value) for name, value in zip(named, values, strict=True)]
