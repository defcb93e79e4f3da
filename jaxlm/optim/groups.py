"""Which parameters are trained, decay and are clipped together, and how fast each learns."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxlm.core import tree
from jaxlm.optim import patterns
from jaxlm.optim.config import Groups
from jaxlm.optim.moments import inputs
from jaxlm.parallel.logical import LAYERS, STACKED, LogicalAxes

TABLE = "table"  # the last name of an embedding's path
HEADS = "heads/"  # what predicts further tokens, after the layers of the model


class Group(NamedTuple):
    """How a leaf is treated. A rate of its own for each layer of a stack is a tuple."""

    decays: bool
    lr_scale: float | tuple[float, ...] = 1.0
    decay_scale: float = 1.0

    def rate(self, dims: int) -> Any:
        """`lr_scale`, to be multiplied with a leaf of so many dimensions."""
        if not isinstance(self.lr_scale, tuple):
            return self.lr_scale
        return np.asarray(self.lr_scale, np.float32).reshape(-1, *(1,) * (dims - 1))


def assign(
    config: Groups, axes: Any, *, shapes: Any = None, width_ratio: float = 1.0
) -> dict[str, Group]:
    """The group of every leaf by its path; `axes` is the tree of logical axis names, tuples as leaves.

    Matrices and tables decay, biases and vectors (a norm's scale) do not, and a layer axis in front makes no matrix
    of a vector. As in nanoGPT's `configure_optimizers` the embeddings decay.

    With `layer_decay` d, layer l of L learns at d^(L + 1 - l), counted from 1, embeddings at d^(L + 1), and what follows
    the layers at 1; `shapes` tells how many layers there are. With a `width_ratio` m, matrices of layers learn at 1 / m, and decay
    m times as much for that, so that what they lose in an update stays.

    Raises:
      ConfigError: where a pattern matches no leaf, or two of a setting match the same.

    Source: Bao et al. 2021, arXiv:2106.08254, section 2.5 and appendix (layer-wise decay); Yang et al. 2022,
    arXiv:2203.03466, table 8, column Adam (rates by width).
    """
    names = tree.leaves(axes, is_leaf=_is_axes)
    bare = {
        path for pattern in config.no_decay for path in patterns.matches("no_decay", pattern, names)
    }
    rates, decays = (
        patterns.factors(config, field, names) for field in ("lr_scale", "decay_scale")
    )
    depths = _depths(config.layer_decay, names, shapes) if config.layer_decay != 1 else {}

    def group(path: str, leaf: LogicalAxes) -> Group:
        ratio = width_ratio if inputs(leaf) else 1.0
        rate = rates.get(path, 1.0) / ratio
        depth = depths.get(path, 1.0)
        return Group(
            path not in bare and _is_matrix(path, leaf),
            tuple(rate * each for each in depth) if isinstance(depth, tuple) else rate * depth,
            decays.get(path, 1.0) * ratio,
        )

    return {path: group(path, leaf) for path, leaf in names.items()}


def frozen(config: Groups, axes: Any) -> frozenset[str]:
    """The paths of the leaves that are not trained. Raises ConfigError where a pattern matches none, or nothing is left."""
    return patterns.frozen(config, tree.leaves(axes, is_leaf=_is_axes))


def unmoved(config: Groups, axes: Any) -> frozenset[str]:
    """The paths of the leaves that no update changes: those that are frozen, and those that learn at 0. Raises as `frozen`."""
    names = tree.leaves(axes, is_leaf=_is_axes)
    rates = patterns.factors(config, "lr_scale", names)
    return patterns.frozen(config, names) | {path for path, rate in rates.items() if not rate}


def clipped(config: Groups, axes: Any) -> list[tuple[frozenset[str], float]]:
    """The leaves whose gradient is clipped together, and to which norm."""
    paths = list(tree.leaves(axes, is_leaf=_is_axes))
    patterns.factors(config, "clip_groups", paths)  # no leaf is in two of them
    entries = [entry.rpartition("=") for entry in config.clip_groups]
    return [
        (frozenset(patterns.matches("clip_groups", pattern, paths)), float(largest))
        for pattern, _, largest in entries
    ]


def _depths(
    decay: float, names: Mapping[str, LogicalAxes], shapes: Any
) -> dict[str, float | tuple[float, ...]]:
    """The factor of each leaf, or of each of its layers; what follows the layers has none, further heads' layers among them."""
    assert shapes is not None, "rates by layer need the number of layers"
    sizes = {path: leaf.shape[0] for path, leaf in tree.leaves(shapes).items()}
    stacked = {
        path: size
        for path, size in sizes.items()
        if names[path][0] in LAYERS and not path.startswith(HEADS)
    }
    found = tree.layer_indices(stacked)
    count = {
        stack: 1 + max(place.numbers[-1] for place in found.values() if place.stack == stack)
        for stack in {place.stack for place in found.values()}
    }
    out: dict[str, float | tuple[float, ...]] = {
        path: tuple(decay ** (count[place.stack] - number) for number in place.numbers)
        for path, place in found.items()
    }
    deepest = max(count.values(), default=0)
    return out | {
        path: decay ** (deepest + 1) for path in names if path.rpartition("/")[2] == TABLE
    }


def _is_matrix(path: str, axes: tuple[str | None, ...]) -> bool:
    return path.rpartition("/")[2] != "bias" and sum(axis not in STACKED for axis in axes) >= 2


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple)
