"""The state that `config.state` predicts is the state that the optimizer creates."""

import collections
import typing

import jax
import jax.numpy as jnp
import pytest

from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.cost.tensors import tensors
from jaxlm.models.families.mistral import Mixtral
from jaxlm.optim import build
from jaxlm.optim.config import Adafactor, Optimizer

MODEL = Mixtral(
    vocab=256,
    width=64,
    depth=3,
    heads=4,
    kv_heads=2,
    experts=4,
    hidden=96,
    shared=32,
    dense_depth=1,
    dense_hidden=128,
    balance_bias=1e-3,
)


@pytest.mark.parametrize(
    "config",
    [*(arm() for arm in typing.get_args(Optimizer)), Adafactor(factor_from=32)],
    ids=lambda c: c.name,
)
def test_moments_have_these_shapes_and_axes(config):
    decoder = MODEL.build()
    blueprint = Blueprint(decoder, Precision.float32())
    optimizer = build.build(config, lambda step: jnp.float32(1.0), blueprint.axes)
    state = jax.eval_shape(optimizer.init, blueprint.shapes)
    axes = build.state_axes(config, optimizer, blueprint.shapes, blueprint.axes)
    names = jax.tree.leaves(axes, is_leaf=_is_axes)
    arrays = collections.Counter(
        (leaf.shape, name, leaf.dtype.itemsize)
        for leaf, name in zip(jax.tree.leaves(state), names, strict=True)
        if leaf.shape
    )
    stated = collections.Counter(
        (array.shape, array.axes, array.item_bytes or 4)
        for each in tensors(decoder)
        for array in config.state(each.shape, each.axes)
    )
    assert stated == arrays


def _is_axes(node):
    return type(node) is tuple and all(each is None or isinstance(each, str) for each in node)
