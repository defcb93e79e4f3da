"""The MLP with each activation against float64 numpy."""

import math
from typing import get_args

import jax
import numpy as np
import pytest

from jaxlm.nn.config import Activation, MlpConfig
from jaxlm.nn.mlp import ACTIVATIONS, Mlp
from tests.nn import reference

WIDTH, HIDDEN = 6, 10
FORMULAS = {
    "gelu": lambda x: x * np.vectorize(lambda z: (1 + math.erf(z / math.sqrt(2))) / 2)(x),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
}


def test_every_activation_that_a_config_can_name_is_there():
    assert set(get_args(Activation)) == ACTIVATIONS.keys() == FORMULAS.keys()


@pytest.mark.few(8)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", FORMULAS)
def test_the_mlp_is_its_formula(activation, gated, bias):
    config = MlpConfig(hidden=HIDDEN, activation=activation, gated=gated, bias=bias)
    mlp, params = reference.moved(lambda key, init: Mlp(WIDTH, config, key=key, init=init))
    x = 2 * jax.random.normal(jax.random.key(2), (2, 5, WIDTH))
    wide = np.asarray(x, np.float64)
    up = reference.linear(wide, params["up"])
    act = FORMULAS[activation]
    hidden = act(reference.linear(wide, params["gate"])) * up if gated else act(up)
    expected = reference.linear(hidden, params["down"])
    np.testing.assert_allclose(mlp(x), expected, rtol=1e-5, atol=2e-5)
    assert ("gate" in params) == gated
