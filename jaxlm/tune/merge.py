"""Merging of an adapter into the weights of its base."""

from typing import Any

import jax
from flax import nnx

from jaxlm.core import tree
from jaxlm.models.backbone import VirtualTokens
from jaxlm.models.build import Blueprint, Params
from jaxlm.tune.adapters import Adapted, BottleneckLinear


def is_mergeable(adapted: Blueprint) -> bool:
    """Return True if the plain model can compute what the adapted one does."""
    module = adapted.merge(adapted.shapes)
    unmerged = (BottleneckLinear, VirtualTokens)
    return not any(isinstance(node, unmerged) for _, node in nnx.iter_graph(module))


def merged_params(adapted: Blueprint, plain: Blueprint, params: Params) -> Params:
    """Return parameters of the plain model that computes what the adapted one does.

    Trace it under `jax.jit`. Sums are computed in float32 and rounded once, to the dtypes of the
    plain model.

    Raises:
      ValueError: if the adapter is no linear map, as a bottleneck.
    """
    leaves = tree.leaves(params)

    def change(path: tuple[Any, ...], node: Adapted) -> dict[str, jax.Array]:
        graphdef, state = nnx.split(node)
        one = lambda state: nnx.merge(graphdef, state).merged()  # noqa: E731
        made = jax.vmap(one)(state) if node.stack else one(state)
        return {"/".join((*map(str, path), name)): value for name, value in made.items()}

    for path, node in nnx.iter_graph(adapted.merge(params)):
        if isinstance(node, Adapted):
            leaves |= change(path, node)
    return tree.map_with_path(lambda path, leaf: leaves[path].astype(leaf.dtype), plain.shapes)
