"""Groups of parameters: frozen, without decay, clipped together, scaled learning rates."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxlm.core import tree
from jaxlm.optim import patterns
from jaxlm.optim.config import OptimizerBase
from jaxlm.optim.moments import inputs
from jaxlm.parallel.logical import LAYERS, STACKED, LogicalAxes

TABLE = "table"  # last name of an embedding's path
HEADS = "heads/"  # path prefix of the multi-token prediction heads, after the model's layers


class ParamGroup(NamedTuple):
    """Weight decay and scales of a leaf; `lr_scale` is a tuple if it differs between layers."""

    decays: bool
    lr_scale: float | tuple[float, ...] = 1.0
    decay_scale: float = 1.0

    def lr_scale_for(self, dims: int) -> Any:
        """Return `lr_scale` in a shape that multiplies a leaf of `dims` dimensions."""
        if not isinstance(self.lr_scale, tuple):
            return self.lr_scale
        return np.asarray(self.lr_scale, np.float32).reshape(-1, *(1,) * (dims - 1))


def assign(
    config: OptimizerBase, axes: Any, *, shapes: Any = None, width_ratio: float = 1.0
) -> dict[str, ParamGroup]:
    """Return the group of every leaf, by path.

    Matrices and tables decay; biases and vectors (a norm's scale) do not. The layer axis of a stack
    does not count as a dimension. Embeddings decay, as in nanoGPT's `configure_optimizers`.

    With `layer_decay` d, the learning-rate scale of layer l of L, counted from 1, is d^(L + 1 - l),
    that of embeddings d^(L + 1), and that of the parameters after the layers 1. With a width ratio
    m, the scale of the blocks' matrices is divided by m and that of their decay multiplied by m, so
    the weight lost in an update does not change.

    Args:
      axes: tree of logical axis names, tuples as leaves.
      shapes: tree of the parameters' shapes; needed for `layer_decay`.
      width_ratio: width of the model over that of its muP base.

    Raises ConfigError if a pattern matches no leaf, or two of a setting match the same leaf.

    Source: Bao et al. 2021, arXiv:2106.08254, section 2.5 and appendix (layer-wise decay); Yang et
    al. 2022, arXiv:2203.03466, table 8, column Adam (rates by width).
    """
    names = tree.leaves(axes, is_leaf=_is_axes)
    undecayed = {
        path for pattern in config.no_decay for path in patterns.matches("no_decay", pattern, names)
    }
    rates = patterns.factors(config, "lr_scale", names)
    decays = patterns.factors(config, "decay_scale", names)
    depths = _depths(config.layer_decay, names, shapes) if config.layer_decay != 1 else {}

    def group(path: str, leaf: LogicalAxes) -> ParamGroup:
        ratio = width_ratio if inputs(leaf) else 1.0
        rate = rates.get(path, 1.0) / ratio
        depth = depths.get(path, 1.0)
        return ParamGroup(
            path not in undecayed and _is_matrix(path, leaf),
            tuple(rate * factor for factor in depth) if isinstance(depth, tuple) else rate * depth,
            decays.get(path, 1.0) * ratio,
        )

    return {path: group(path, leaf) for path, leaf in names.items()}


def frozen(config: OptimizerBase, axes: Any) -> frozenset[str]:
    """Return the paths of the leaves that are not trained; see `patterns.frozen`."""
    return patterns.frozen(config, tree.leaves(axes, is_leaf=_is_axes))


def unmoved(config: OptimizerBase, axes: Any) -> frozenset[str]:
    """Return the paths of the leaves that are frozen or have a learning rate of 0."""
    names = tree.leaves(axes, is_leaf=_is_axes)
    rates = patterns.factors(config, "lr_scale", names)
    return patterns.frozen(config, names) | {path for path, rate in rates.items() if not rate}


def clip_groups(config: OptimizerBase, axes: Any) -> list[tuple[frozenset[str], float]]:
    """Return the paths of each group of leaves that is clipped together, and its largest norm."""
    paths = list(tree.leaves(axes, is_leaf=_is_axes))
    patterns.factors(config, "clip_groups", paths)  # raises if a leaf is in two groups
    entries = [entry.rpartition("=") for entry in config.clip_groups]
    return [
        (frozenset(patterns.matches("clip_groups", pattern, paths)), float(largest))
        for pattern, _, largest in entries
    ]


def _depths(
    decay: float, names: Mapping[str, LogicalAxes], shapes: Any
) -> dict[str, float | tuple[float, ...]]:
    """Return the `layer_decay` factor of each leaf, or of each of its layers.

    Parameters after the layers, which includes those of the prediction heads, have no factor.
    """
    assert shapes is not None, "layer_decay needs the shapes of the parameters"
    sizes = {path: leaf.shape[0] for path, leaf in tree.leaves(shapes).items()}
    layered = {path for path in sizes if names[path][0] in LAYERS and not path.startswith(HEADS)}
    indices = tree.layer_indices({path: sizes[path] for path in sizes if path in layered})
    count: dict[str, int] = {}
    for place in indices.values():
        count[place.stack] = max(count.get(place.stack, 0), 1 + place.numbers[-1])
    out: dict[str, float | tuple[float, ...]] = {
        path: tuple(decay ** (count[place.stack] - number) for number in place.numbers)
        for path, place in indices.items()
    }
    deepest = max(count.values(), default=0)
    tables = [path for path in names if path.rpartition("/")[2] == TABLE]
    return out | dict.fromkeys(tables, decay ** (deepest + 1))


def _is_matrix(path: str, axes: LogicalAxes) -> bool:
    return path.rpartition("/")[2] != "bias" and sum(axis not in STACKED for axis in axes) >= 2


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple)
