"""The attention module against float64 numpy, with each of its options."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.nn.attention import Attention, LayerInputs
from jaxlm.nn.config import AttentionConfig, NormConfig
from jaxlm.nn.rotary import LongScaling, Rope, YarnScaling
from jaxlm.ops import masks
from tests.nn import reference

ROWS, LENGTH, WIDTH = 2, 9, 12
PLAIN = AttentionConfig(heads=4, kv_heads=2, head_dim=6)
OPTIONS = {
    "plain": {},
    "one key head": {"kv_heads": 1},
    "a key head each": {"kv_heads": 4},
    "biases": {"bias": True},
    "a bias at the end": {"out_bias": True},
    "rotary": {"rotary": Rope(theta=100.0)},
    "rotary in part": {"rotary": Rope(theta=100.0, share=0.7)},
    "rotary, beyond": {  # the second row is
        "rotary": Rope(
            theta=100.0,
            scaling=LongScaling(
                short=(1.0, 2.0, 3.0), long=(4.0, 9.0, 2.0), original=10, factor=4.0
            ),
        )
    },
    "rotary, stretched": {"rotary": Rope(theta=100.0, scaling=YarnScaling(original=16))},
    "window": {"window": 3},
    "normed queries": {"qk_norm": NormConfig(eps=1e-3)},
    "queries normed together": {"qk_norm": NormConfig(offset=1.0), "qk_norm_over": "heads"},
    "softcap": {"softcap": 0.5},
    "scale": {"scale": 2.0},
    "all at once": {
        "rotary": Rope(),
        "window": 4,
        "qk_norm": NormConfig(kind="layer", bias=True),
        "softcap": 2.0,
        "scale": 1.5,
        "bias": True,
        "out_bias": True,
    },
}


def outputs(config):
    module, params = reference.moved(lambda key, init: Attention(WIDTH, config, key=key, init=init))
    x = jax.random.normal(jax.random.key(2), (ROWS, LENGTH, WIDTH))
    # The second row begins elsewhere, and has a gap.
    positions = np.stack((np.arange(LENGTH), 5 + np.arange(LENGTH) ** 2)).astype(np.int32)
    inputs = LayerInputs(jnp.asarray(positions), masks.causal(LENGTH))
    got, cache = jax.jit(lambda x: module(x, inputs))(x)
    assert cache is None
    return got, reference.attention(np.asarray(x, np.float64), params, config, positions)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_what_it_says(option):
    got, expected = outputs(dataclasses.replace(PLAIN, **OPTIONS[option]))
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("option", ["rotary", "window", "softcap", "scale"])
def test_an_option_changes_what_comes_out(option):
    plain, _ = outputs(PLAIN)
    changed, _ = outputs(dataclasses.replace(PLAIN, **OPTIONS[option]))
    assert float(jnp.abs(plain - changed).max()) > 1e-2
