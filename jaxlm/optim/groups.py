"""Which parameters decay, and how fast each learns."""

import fnmatch
from typing import Any, NamedTuple

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.optim.config import Groups
from jaxlm.parallel.logical import STACKED


class Group(NamedTuple):
    """How the leaves of one group are treated."""

    decays: bool
    lr_scale: float


def assign(config: Groups, axes: Any) -> dict[str, Group]:
    """The group of every leaf by its path; `axes` is the tree of logical axis names, tuples as leaves.

    Matrices and tables decay, biases and vectors (a norm's scale) do not, and a layer axis in front makes no matrix
    of a vector. As in nanoGPT's `configure_optimizers` the embeddings decay.

    Raises:
      ConfigError: where a pattern matches no leaf, or two of lr_scale match the same.
    """
    names = tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))
    bare = {path for pattern in config.no_decay for path in _matches("no_decay", pattern, names)}
    scales: dict[str, tuple[str, float]] = {}
    for entry in config.lr_scale:
        pattern, _, factor = entry.rpartition("=")
        for path in _matches("lr_scale", pattern, names):
            if path in scales:
                raise ConfigError(
                    f"two learning-rate groups hold {path}",
                    where="optim.lr_scale",
                    why=f"{scales[path][0]!r} and {pattern!r} both match it",
                    fix="narrow one pattern: every parameter lies in one group",
                )
            scales[path] = (pattern, float(factor))
    return {
        path: Group(path not in bare and _is_matrix(path, leaf), scales.get(path, ("", 1.0))[1])
        for path, leaf in names.items()
    }


def _is_matrix(path: str, axes: tuple[str | None, ...]) -> bool:
    return path.rpartition("/")[2] != "bias" and sum(axis not in STACKED for axis in axes) >= 2


def _matches(field: str, pattern: str, paths: dict[str, Any]) -> list[str]:
    found = [path for path in paths if fnmatch.fnmatchcase(path, pattern)]
    if not found:
        raise ConfigError(
            f"the pattern {pattern!r} matches no parameter",
            where=f"optim.{field}",
            why="parameters are " + ", ".join(list(paths)[:6]) + (" ..." if len(paths) > 6 else ""),
            fix=f'--config.optim.{field}="()", or a pattern over these paths',
        )
    return found
