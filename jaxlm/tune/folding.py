"""Factors of a layer's inputs that an earlier operation divides by: the function stays the same."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlm.nn.attention import Attention, LatentAttention
from jaxlm.nn.block import Block
from jaxlm.nn.linear import GroupedLinear, Linear
from jaxlm.nn.mlp import Mlp
from jaxlm.nn.moe import Moe
from jaxlm.nn.norm import Norm

BEFORE_ATTENTION = ("pre", "sandwich", "parallel", "parallel_norms")
BEFORE_MLP = ("pre", "pre_mlp", "sandwich", "parallel_norms")


class Fold(NamedTuple):
    """A source whose results are divided by factors, and all readers that multiply with them.

    Each of the `repeats` of a factor is for one of the query heads that share a head of values.
    """

    source: Norm | Linear
    readers: tuple[str, ...]  # paths of linear layers in the block; the first reads all factors
    repeats: int = 1


def folds(block: Block) -> Iterator[Fold]:
    """Yield the folds of a block, those of later operations first.

    There are none before experts, whose router and weights read one input, after an MLP without a
    gate, whose activation is no multiple of its input, and after a norm that the residual stream
    passes.
    """
    attention, mlp, residual = block.attention, block.mlp, block.config.residual
    if isinstance(mlp, Mlp) and mlp.gate is not None:
        yield Fold(mlp.up, ("mlp/down",))
    inputs = () if isinstance(mlp, Moe) else ("mlp/up",) if mlp.gate is None else MLP_INPUTS
    if inputs and residual in BEFORE_MLP and block.mlp_norm is not None:
        yield Fold(block.mlp_norm, inputs)
    if isinstance(attention, Attention):
        heads = attention.config.heads // attention.config.kv_heads
        yield Fold(attention.value, ("attention/out",), heads)
        readers: tuple[str, ...] = ("attention/query", "attention/key", "attention/value")
    else:
        assert isinstance(attention, LatentAttention)
        first = "query" if attention.query_latent is None else "query_latent"
        readers = tuple(f"attention/{name}" for name in (first, "latent", "rotary_key"))
    if residual not in BEFORE_ATTENTION or block.attention_norm is None:
        return
    if residual == "parallel":
        if not inputs:
            return
        readers += inputs
    yield Fold(block.attention_norm, readers)


MLP_INPUTS = ("mlp/gate", "mlp/up")


def linear_layers(block: nnx.Module) -> dict[str, Linear]:
    """Return the linear layers of a block by path."""
    nodes = (("/".join(map(str, path)), node) for path, node in nnx.iter_graph(block))
    return {path: node for path, node in nodes if isinstance(node, Linear)}


def expert_layers(block: nnx.Module) -> dict[str, GroupedLinear]:
    """Return the linear maps of a block's experts by path."""
    nodes = (("/".join(map(str, path)), node) for path, node in nnx.iter_graph(block))
    return {path: node for path, node in nodes if isinstance(node, GroupedLinear)}


def apply(fold: Fold, factors: Array, layers: dict[str, Linear]) -> None:
    """Divide the source by factors in place and multiply the readers' inputs with them.

    Args:
      fold: one of `folds` of the block.
      factors: one for each input of the readers.
      layers: `linear_layers` of the block.
    """
    for path in fold.readers:
        layer = layers[path]
        shape = layer.ins + (1,) * len(layer.outs)
        _multiply(layer.weight, factors.reshape(shape))
    source = fold.source
    if isinstance(source, Norm):
        scale, offset = source.scale, source.config.offset
        shape = scale[...].shape
        new = (scale[...].astype(jnp.float32) + offset) / factors.reshape(shape) - offset
        scale[...] = new.astype(scale[...].dtype)
        if source.bias is not None:
            _multiply(source.bias, 1 / factors.reshape(shape))
        return
    outs = source.outs
    if fold.repeats > 1:  # [kv_heads, repeats, head_dim]
        factors = factors.reshape(outs[0], fold.repeats, -1)[:, 0]
    _multiply(source.weight, 1 / factors.reshape((1,) * len(source.ins) + outs))
    if source.bias is not None:
        _multiply(source.bias, 1 / factors.reshape(outs))


def _multiply(leaf: nnx.Param, factors: Array) -> None:
    value = leaf[...]
    wide = jax.lax.mul(*jnp.broadcast_arrays(value.astype(jnp.float32), factors))
    leaf[...] = wide.astype(value.dtype)
