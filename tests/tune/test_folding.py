"""Factors that move from an operation to its readers leave the function as it is."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.families.cohere import Cohere
from jaxlm.models.families.deepseek import DeepSeekV2
from jaxlm.models.families.gemma import Gemma2
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.mistral import Mixtral
from jaxlm.models.families.qwen import Qwen2
from jaxlm.tune import folding
from tests.models.parameters import draw_params

SIZES = {"vocab": 50, "width": 32, "depth": 1, "heads": 4}
FAMILIES = {
    "qwen2": (Qwen2(**SIZES, kv_heads=2), 4),
    "gpt2": (GPT2(**SIZES, max_positions=16), 3),
    "gemma2": (Gemma2(**SIZES, kv_heads=2), 4),
    "cohere": (Cohere(**SIZES, kv_heads=2), 3),
    "mixtral": (Mixtral(**SIZES, kv_heads=2, experts=2, top_k=1), 2),
    "deepseek_v2": (DeepSeekV2(**SIZES | {"depth": 2}, experts=2, top_k=1), 3),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_folded_block_computes_the_same(name):
    family, count = FAMILIES[name]
    blueprint = Blueprint(family.build(), Precision.float32(), layers="unroll")
    draw, params = np.random.default_rng(0), draw_params(blueprint, std=0.1)
    ids = jnp.arange(12, dtype=jnp.int32)[None]

    def streams(fold):
        """Return the stream after the only layer, whose folds have random factors."""
        module = blueprint.merge(params)
        stack = module.prefix or module.stack
        unstacked = stack.unstacked()
        block, seen = unstacked.blocks[0], 0
        layers = folding.linear_layers(block)
        for each in folding.folds(block) if fold else ():
            size = int(np.prod(layers[each.readers[0]].ins))
            factors = np.exp(draw.normal(size=size)).astype(np.float32)
            if each.repeats > 1:
                heads = factors.reshape(-1, each.repeats, layers[each.readers[0]].ins[-1])
                factors = np.broadcast_to(heads[:, :1], heads.shape).reshape(-1)
            folding.apply(each, jnp.asarray(factors), layers)
            seen += 1

        class One:
            def __call__(self, x, inputs, *, caches, key):
                y, _, losses = block(x, inputs)
                return y, None, losses

        module.prefix, module.stack = None, One()
        return np.asarray(module.hidden(ids, positions=ids).stream), seen

    (before, _), (after, folds) = streams(False), streams(True)
    assert folds == count
    np.testing.assert_allclose(after, before, atol=1e-6 * np.abs(before).max() * 4)
