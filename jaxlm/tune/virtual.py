"""Virtual tokens before every text: their embeddings, or their keys and values in each layer."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlm.core import random
from jaxlm.core.errors import ConfigError
from jaxlm.models.backbone import VirtualTokens
from jaxlm.nn.attention import Attention, CrossAttention, LatentAttention, LeadingKV
from jaxlm.nn.linear import LOGICAL_AXES, Linear, parameter
from jaxlm.tune import config

STD = 0.02  # of the initial keys and values


def add_prefix(settings: config.PrefixTuning, module: Any, key: Array) -> None:
    """Add keys and values to the self-attention of each layer. Raises ConfigError for MLA."""
    layers = list(nnx.iter_graph(module))
    for path, node in layers:
        name = "/".join(map(str, path))
        if isinstance(node, LatentAttention):
            raise ConfigError(
                f"prefix does not support {name}",
                where="tune.name",
                why="latent attention stores no keys and values of heads",
                fix="--config.tune.name=prompt",
            )
        if isinstance(node, Attention) and not isinstance(node, CrossAttention):
            keys = jax.random.split(random.stream(key, f"tune/{name}"))
            pairs = zip((node.key, node.value), keys, strict=True)
            node.leading = LeadingKV(*(_rows(settings.length, *pair) for pair in pairs))
    module.virtual = VirtualTokens(settings.length)


def _rows(count: int, layer: Linear, key: Array) -> nnx.Param:
    """Return initial keys or values, of the outputs of a projection, in a stack for each layer."""
    shape = layer.weight[...].shape
    stack = shape[: len(shape) - len(layer.ins) - len(layer.outs)]
    values = STD * jax.random.normal(key, (*stack, count, *layer.outs), jnp.float32)
    axes: Any = {LOGICAL_AXES: ("positions", *layer.weight.get_metadata()[LOGICAL_AXES][1:])}
    return nnx.Param(values.astype(layer.precision.params), **axes)


def add_prompt(settings: config.PromptTuning, ids: Sequence[int], module: Any, key: Array) -> None:
    """Add embeddings, which begin as those of `ids` in turn, or of random ids if there are none."""
    embedding, count = module.embedding, settings.length
    random_ids = jax.random.randint(
        random.stream(key, "tune/virtual"), (count,), 0, module.config.vocab
    )
    first = list(itertools.islice(itertools.cycle(ids), count))
    chosen = jnp.asarray(first, jnp.int32) if first else random_ids
    rows = embedding(chosen[None])[0].astype(jnp.float32) * module.config.embed_scale
    rows = parameter(rows.astype(embedding.precision.params), "positions", "embed")
    module.virtual = VirtualTokens(count, rows)
