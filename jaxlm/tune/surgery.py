"""Replacement of linear layers by adapted ones, inside of a module that was just built."""

import fnmatch
import math
from collections.abc import Callable
from typing import Any

from flax import nnx
from jax import Array

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.models.build import Blueprint, Params
from jaxlm.nn.linear import GroupedLinear, Linear
from jaxlm.tune import config
from jaxlm.tune.adapters import LAYERS

Surgery = Callable[[nnx.Module, Array], None]


def build(settings: config.Tune) -> Surgery | None:
    """Return the function (module, key) that adds an adapter in place; None for full tuning."""
    if isinstance(settings, config.Full):
        return None
    classes = LAYERS[type(settings)]

    def apply(module: nnx.Module, key: Array) -> None:
        layers = {
            path: node
            for path, node in nnx.iter_graph(module)
            if isinstance(node, (Linear, GroupedLinear))
        }
        names = {"/".join(map(str, path)): path for path in layers}
        for name in adapted_layers(settings, list(names)):
            path = names[name]
            node = layers[path]
            if isinstance(node, GroupedLinear) or type(node) not in classes:
                raise _not_supported(settings, name, node)
            smaller = min(math.prod(node.ins), math.prod(node.outs))
            if isinstance(settings, config.Lora) and settings.rank > smaller:
                raise ConfigError(
                    f"rank {settings.rank} is too large for {name}",
                    where="tune.rank",
                    why=f"its weight has {math.prod(node.ins)} inputs and {math.prod(node.outs)} "
                    "outputs, and no update of it has a larger rank",
                    fix=f"--config.tune.rank={smaller}",
                )
            parent: Any = module
            for part in path[:-1]:
                parent = getattr(parent, part) if isinstance(part, str) else parent[part]
            setattr(parent, str(path[-1]), classes[type(node)](node, settings, name, key))

    return apply


def adapted_params(plain: Blueprint, surgery: Surgery, base: Params, key: Array) -> Params:
    """Return all parameters of the adapted model: those of the base, and new initial ones.

    Args:
      plain: the model without an adapter.
      surgery: result of `build`.
      base: parameters of the plain model; DoRA's magnitudes begin at the norms of its weights.
      key: key of the initial values.
    """
    module = plain.merge(base)
    surgery(module, key)
    return nnx.to_pure_dict(nnx.state(module))


def adapted_layers(settings: config.AdapterConfig, names: list[str]) -> list[str]:
    """Return the layers of these names that the patterns of `tune.at` match by their weights.

    Raises:
      ConfigError: if a pattern matches no layer.
    """
    matched: dict[str, None] = {}
    for pattern in settings.at:
        hits = [name for name in names if fnmatch.fnmatchcase(f"{name}/weight", pattern)]
        if not hits:
            raise ConfigError(
                f"the pattern {pattern!r} matches no linear layer",
                where="tune.at",
                why="their weights are "
                + ", ".join(f"{name}/weight" for name in names[:6])
                + (" ..." if len(names) > 6 else ""),
                fix=f"--config.tune.at={','.join(config.PROJECTIONS)}",
            )
        matched |= dict.fromkeys(hits)
    return list(matched)


def base_paths(settings: config.Tune, plain: Blueprint) -> frozenset[str]:
    """Return the paths of the leaves that are read from the base and not trained.

    Raises:
      ConfigError: if a pattern of `tune.also` matches no leaf of the base.
    """
    if isinstance(settings, config.Full):
        return frozenset()
    base = list(tree.leaves(plain.shapes))
    whole: set[str] = set()
    for pattern in settings.also:
        hits = fnmatch.filter(base, pattern)
        if not hits:
            raise ConfigError(
                f"the pattern {pattern!r} matches no parameter",
                where="tune.also",
                why="parameters are " + ", ".join(base[:6]) + (" ..." if len(base) > 6 else ""),
                fix="'--config.tune.also=()'",
            )
        whole |= set(hits)
    return frozenset(base) - whole


def _not_supported(settings: Any, name: str, node: nnx.Module) -> ConfigError:
    kind = "a projection of experts" if isinstance(node, GroupedLinear) else "a latent projection"
    return ConfigError(
        f"{settings.name} does not support {name}",
        where="tune.at",
        why=f"it is {kind}",
        fix="'--config.tune.at=*/attention/*'"
        if isinstance(node, GroupedLinear)
        else "--config.tune.name=lora",
    )
