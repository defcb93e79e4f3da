import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.nn.linear import LOGICAL_AXES, Linear, Product, parameter
from tests.nn import reference

STREAM, HEADS = {"embed": 6}, {"heads": 3, "head_dim": 4}


def made(ins, outs, *, precision=reference.FLOAT32, **options):
    return reference.moved(
        lambda key, init: Linear(ins, outs, key=key, init=init, **options), precision=precision
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("ins", "outs", "equation"),
    [
        (STREAM, {"mlp": 5}, "btd,df->btf"),
        (STREAM, HEADS, "btd,dnh->btnh"),
        (HEADS, STREAM, "btnh,nhd->btd"),
    ],
)
def test_every_input_dimension_is_summed_and_every_output_dimension_kept(ins, outs, equation, bias):
    linear, params = made(ins, outs, bias=bias)
    x = jax.random.normal(jax.random.key(2), (2, 7, *ins.values()))
    expected = np.einsum(equation, np.asarray(x, np.float64), params["weight"])
    expected += params["bias"] if bias else 0.0
    np.testing.assert_allclose(linear(x), expected, rtol=1e-5, atol=1e-5)
    assert ("bias" in params) == bias


def test_the_weight_keeps_its_dimensions_and_their_names():
    linear, params = made(STREAM, HEADS, bias=True)
    assert params["weight"].shape == (6, 3, 4)
    assert linear.weight.get_metadata()[LOGICAL_AXES] == ("embed", "heads", "head_dim")
    assert linear.bias.get_metadata()[LOGICAL_AXES] == ("heads", "head_dim")
    with pytest.raises(ValueError, match="1 axis names"):
        parameter(jnp.zeros((2, 3)), "embed")


def test_the_bias_is_added_in_the_dtype_that_comes_out(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    precision = Precision.of(PrecisionConfig(compute="bfloat16"))
    for result, expected in ((None, jnp.bfloat16), (jnp.dtype(jnp.float32), jnp.float32)):
        product = Product(result)
        linear, params = made(STREAM, {"mlp": 5}, precision=precision, bias=True, product=product)
        x = jax.random.normal(jax.random.key(2), (1, 3, 6), jnp.bfloat16)
        out = linear(x)
        assert out.dtype == expected
        exact = np.asarray(x, np.float64) @ params["weight"] + params["bias"]
        np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=0.03, atol=0.03)
