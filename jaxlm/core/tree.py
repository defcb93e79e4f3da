"""Trees of arrays: leaf paths, sizes."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def path_text(path: tuple[Any, ...]) -> str:
    """A JAX key path as "blocks/attention/query/weight"."""
    return "/".join(
        str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part))))
        for part in path
    )


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Every leaf by its path, in tree order."""
    return {
        path_text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    }


def map_with_path(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` whose function also gets the leaf's path as its first argument."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *xs: function(path_text(path), *xs), tree, *rest
    )


def drop_leaves(tree: dict[str, Any], paths: Collection[str]) -> dict[str, Any]:
    """A nested dict less the leaves at these paths, and less what is empty then."""

    def kept(node: dict[str, Any], stem: str) -> dict[str, Any]:
        inner = {
            name: kept(child, f"{stem}{name}/") if isinstance(child, dict) else child
            for name, child in node.items()
            if f"{stem}{name}" not in paths
        }
        return {
            name: child for name, child in inner.items() if not isinstance(child, dict) or child
        }

    return kept(tree, "") if paths else tree


def merge_leaves(whole: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """A nested dict with the leaves that a part of it has, instead of its own."""
    return whole | {
        name: merge_leaves(whole[name], child) if isinstance(child, dict) else child
        for name, child in part.items()
    }


def count(tree: Any) -> int:
    """Elements in all leaves."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def size_bytes(tree: Any) -> int:
    """Bytes in all leaves, over all devices, replicas counted once."""
    return sum(
        int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree)
    )


def norm(tree: Any) -> Float[Array, ""]:
    """Return the global L2 norm, sqrt(sum x^2) over all leaves, squared and added up in float32 whatever they are."""
    squares = (jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree))
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))
