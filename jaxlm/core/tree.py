"""Trees of arrays: leaf paths, nested dicts of leaves, sizes."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def path_text(path: tuple[Any, ...]) -> str:
    """Return a JAX key path as "blocks/attention/query/weight"."""
    return "/".join(
        str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part))))
        for part in path
    )


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Return every leaf by its path, in tree order."""
    return {
        path_text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    }


def map_with_path(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply `jax.tree.map` with the leaf's path as the function's first argument."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *xs: function(path_text(path), *xs), tree, *rest
    )


def drop_leaves(tree: dict[str, Any], paths: Collection[str]) -> dict[str, Any]:
    """Return a nested dict without the leaves at `paths` and without dicts that become empty."""

    def pruned(node: dict[str, Any], stem: str) -> dict[str, Any]:
        inner = {
            name: pruned(child, f"{stem}{name}/") if isinstance(child, dict) else child
            for name, child in node.items()
            if f"{stem}{name}" not in paths
        }
        return {
            name: child for name, child in inner.items() if not isinstance(child, dict) or child
        }

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
    return sum(
        int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree)
    )


def norm(tree: Any) -> Float[Array, ""]:
    """Return the global L2 norm, sqrt(sum x^2) over all leaves, computed in float32."""
    squares = (jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree))
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))
