"""Changes of a module that was just built: adapted layers for linear ones, and virtual tokens."""

import fnmatch
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax import nnx
from jax import Array

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.models.build import Blueprint, Params
from jaxlm.nn.embedding import Embedding
from jaxlm.nn.linear import GroupedLinear, Linear
from jaxlm.ops.kernels import INTEGERS
from jaxlm.tune import config, virtual
from jaxlm.tune.adapters import LAYERS
from jaxlm.tune.quantized import PREFIX, QUANTIZED, StoredWeight

HEAD, TABLE = "unembedding/weight", "embedding/table"  # a tied model has the second alone
Surgery = Callable[[nnx.Module, Array], None]


def build(
    settings: config.Tune, encode: Callable[[str], Sequence[int]] | None = None
) -> Surgery | None:
    """Return the function (module, key) that adds an adapter in place; None for full tuning.

    A layer that the settings quantize is quantized first, if `quantization` has not done so;
    `Quantized` does nothing else.
    `encode` makes ids of a text, for initial values.
    """
    if isinstance(settings, config.Full):
        return None
    if isinstance(settings, config.Quantized):
        return quantization(settings)
    if isinstance(settings, config.PrefixTuning):
        return functools.partial(virtual.add_prefix, settings)
    if isinstance(settings, config.PromptTuning):
        ids = encode(settings.text) if encode and settings.text else ()
        return functools.partial(virtual.add_prompt, settings, tuple(ids))
    classes = LAYERS[type(settings)]

    def apply(module: nnx.Module, key: Array) -> None:
        for name, path, node in _matched_layers(settings, module):
            if isinstance(settings, config.QLora) and _has_codes(settings, node):
                node = QUANTIZED[type(node)](node, settings)
            if type(node) not in classes:
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
            replace(module, path, classes[type(node)](node, settings, name, key))

    return apply


def quantization(settings: config.Tune) -> Surgery | None:
    """Return the function (module, key) that quantizes the matched layers; None if none are."""
    if not isinstance(settings, config.QLora | config.Quantized):
        return None

    def apply(module: nnx.Module, key: Array) -> None:
        del key
        for name, path, node in _matched_layers(settings, module):
            if not _has_codes(settings, node):
                raise _not_supported(settings, name, node)
            replace(module, path, QUANTIZED[type(node)](node, settings))

    return apply


def _has_codes(settings: config.QLora | config.Quantized, node: nnx.Module) -> bool:
    """Return whether a layer can be quantized; products of integers have no groups of rows."""
    if isinstance(node, GroupedLinear):
        return isinstance(settings, config.Quantized) and settings.base not in INTEGERS
    return type(node) in QUANTIZED


def quantized_weights(base: Blueprint) -> dict[str, StoredWeight]:
    """Return the quantized layers of a base by the paths of the weights that they store."""
    module = base.merge(base.shapes)
    nodes = ((path, node) for path, node in nnx.iter_graph(module))
    return {
        "/".join((*map(str, path), node.weight_name)): node
        for path, node in nodes
        if isinstance(node, StoredWeight)
    }


def _matched_layers(
    settings: config.AdapterConfig | config.Quantized, module: nnx.Module
) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Yield name, path and node of each layer that the patterns of `tune.at` match."""
    kinds: tuple[type, ...] = (Linear, GroupedLinear)
    if isinstance(settings, config.Quantized):
        kinds += (Embedding,)
    layers = {
        "/".join((*map(str, path), "table" if isinstance(node, Embedding) else "weight")): (
            path,
            node,
        )
        for path, node in nnx.iter_graph(module)
        if isinstance(node, kinds)
    }
    for weight in adapted_weights(settings, list(layers)):
        yield weight.rpartition("/")[0], *layers[weight]


def replace(module: Any, path: tuple[Any, ...], node: Any) -> None:
    """Put another node at a path of a module."""
    for part in path[:-1]:
        module = getattr(module, part) if isinstance(part, str) else module[part]
    setattr(module, str(path[-1]), node)


def adapted_params(stored: Blueprint, surgery: Surgery, base: Params, key: Array) -> Params:
    """Return all parameters of the adapted model: those of the base, and new initial ones.

    Args:
      stored: the model without an adapter, quantized by `quantization`.
      surgery: result of `build`.
      base: parameters of this model; DoRA's magnitudes begin at the norms of its weights.
      key: key of the initial values.
    """
    module = stored.merge(base)
    surgery(module, key)
    return nnx.to_pure_dict(nnx.state(module))


def adapted_weights(
    settings: config.AdapterConfig | config.Quantized, names: list[str]
) -> list[str]:
    """Return the weights of these paths that the patterns of `tune.at` match.

    Raises:
      ConfigError: if a pattern matches no layer.
    """
    matched: dict[str, None] = {}
    for pattern in settings.at:
        hits = [name for name in names if config.is_at(pattern, name)]
        if not hits:
            raise ConfigError(
                f"the pattern {pattern!r} matches no linear layer",
                where="tune.at",
                why="their weights are "
                + ", ".join(names[:6])
                + (" ..." if len(names) > 6 else ""),
                fix=f"'--config.tune.at={','.join(config.PROJECTIONS)}'",
            )
        matched |= dict.fromkeys(hits)
    return list(matched)


def base_paths(settings: config.Tune, stored: Blueprint) -> frozenset[str]:
    """Return the paths of the leaves of the base that are not trained.

    Raises:
      ConfigError: if a pattern of `tune.also` matches no leaf of the base, or a quantized one.
    """
    if isinstance(settings, config.Full | config.Quantized):  # all leaves are in the checkpoints
        return frozenset()
    base = tree.leaves(stored.shapes)
    whole: set[str] = set()
    for pattern in settings.also:
        hits = fnmatch.filter(base, pattern)
        if not hits and fnmatch.fnmatchcase(HEAD, pattern):
            raise ConfigError(
                f"the pattern {pattern!r} matches no parameter",
                where="tune.also",
                why=f"the head is tied to the embedding: {TABLE} is the weight of both",
                fix=f"--config.tune.also={TABLE}",
            )
        if not hits:
            raise ConfigError(
                f"the pattern {pattern!r} matches no parameter",
                where="tune.also",
                why="parameters are "
                + ", ".join(list(base)[:6])
                + (" ..." if len(base) > 6 else ""),
                fix="'--config.tune.also=()'",
            )
        whole |= set(hits)
    layers = [path.rpartition("/")[0] + "/" for path in quantized_weights(stored)]
    codes = [
        path
        for path in sorted(whole)
        if path.rpartition("/")[2].startswith(PREFIX) and path.startswith(tuple(layers))
    ]
    if codes:
        raise ConfigError(
            "quantized weights cannot be trained",
            where="tune.also",
            why=f"it matches {codes[0]}, which tune.base={getattr(settings, 'base', '')} rounds",
            fix="'--config.tune.also=*norm/scale'",
        )
    return frozenset(base) - whole


def _not_supported(settings: Any, name: str, node: nnx.Module) -> ConfigError:
    is_experts, name_of = isinstance(node, GroupedLinear), settings.name
    kind = "it is a projection of experts" if is_experts else "it is a latent projection"
    if isinstance(settings, config.Quantized):
        name_of, kind = settings.base, "it is of experts, whose products are of floats"
    return ConfigError(
        f"{name_of} does not support {name}",
        where="tune.at",
        why=kind,
        fix="'--config.tune.at=*/attention/*'" if is_experts else "--config.tune.name=lora",
    )
