"""Trees of arrays: leaf paths, nested dicts of leaves, layers of stacked leaves, sizes.

Example:
    >>> params = {"head": {"weight": np.ones((4, 3), np.float32), "bias": np.zeros(3, np.int8)}}
    >>> list(leaves(params)), count(params), size_bytes(params)
    (['head/bias', 'head/weight'], 15, 51)
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

_STACKED = re.compile(r"(.+?)/(\d+)/(.+)")  # stack, kind of layer, path within the layer


def path_text(path: tuple[Any, ...]) -> str:
    """Return a JAX key path as "blocks/attention/query/weight"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Return every leaf by its path, in tree order."""
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    return {path_text(path): leaf for path, leaf in pairs}


def map_with_path(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply `jax.tree.map` with the leaf's path as the function's first argument."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *xs: function(path_text(path), *xs), tree, *rest
    )


def drop_leaves(tree: dict[str, Any], paths: Collection[str]) -> dict[str, Any]:
    """Return a nested dict without the leaves at `paths` and without dicts that become empty."""

    def pruned(node: Any, path: str) -> Any:
        if not isinstance(node, dict):
            return node
        names = (name for name in node if f"{path}{name}" not in paths)
        inner = {name: pruned(node[name], f"{path}{name}/") for name in names}
        empty = [name for name, child in inner.items() if isinstance(child, dict) and not child]
        return {name: child for name, child in inner.items() if name not in empty}

    return pruned(tree, "") if paths else tree


def merge_leaves(whole: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Return the nested dict `whole` with the leaves of `part` in place of its own."""
    return whole | {
        name: merge_leaves(whole[name], child) if isinstance(child, dict) else child
        for name, child in part.items()
    }


def count(tree: Any) -> int:
    """Return the number of elements in all leaves."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def size_bytes(tree: Any) -> int:
    """Return the bytes of all leaves over all devices, replicas counted once."""
    return sum(count(leaf) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def norm(tree: Any) -> Float[Array, ""]:
    """Return the global L2 norm, sqrt(sum x^2) over all leaves, computed in float32."""
    squares = (jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree))
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))


def is_finite(tree: Any) -> Bool[Array, ""]:
    """Return whether all numbers of all leaves are finite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


class LayerIndex(NamedTuple):
    """Layers of a stacked leaf, counted from 0, prefix first; and its path within a layer."""

    stack: str  # "" for the model's main stack, else the path of the stack
    numbers: range
    part: str


def layer_indices(sizes: Mapping[str, int]) -> dict[str, LayerIndex]:
    """Return the layers of each leaf `STACK/KIND/...`; `sizes` are the sizes of the first axes.

    Other paths are left out. A stack's kinds of layers alternate: the n-th layer of kind k is layer
    k + n x kinds.
    """
    kinds: dict[str, dict[str, int]] = {}
    matches = {path: match for path in sizes if (match := _STACKED.fullmatch(path))}
    for path, match in matches.items():
        kinds.setdefault(match[1], {})[match[2]] = sizes[path]
    before = sum(kinds.get("prefix", {}).values())

    result = {}
    for path, match in matches.items():
        stack, kind, part = match.groups()
        first, step = int(kind) + (before if stack == "stack" else 0), len(kinds[stack])
        numbers = range(first, first + step * sizes[path], step)
        result[path] = LayerIndex("" if stack in ("prefix", "stack") else stack, numbers, part)
    return result
