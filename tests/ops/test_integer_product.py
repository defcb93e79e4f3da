"""Products of integers: their values, and training that computes what is stored later."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.ops.integer_product import FORMATS, integer_product, qat_matmul
from jaxlm.ops.matmul import matmul
from jaxlm.tune import surgery
from jaxlm.tune.config import Quantized
from tests.models.parameters import draw_params

FLOAT32 = jnp.dtype("float32")


def operands(rows=5, inputs=67, outs=24):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows, inputs)).astype(np.float32)
    x[:, 3] *= 30
    return x, draw.normal(size=(inputs, outs)).astype(np.float32)


def rounded(values, most, axis):
    scale = np.abs(values).max(axis, keepdims=True).astype(np.float64) / most
    return np.round(values / scale) * scale


@pytest.mark.few(2)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_a_product_is_that_of_both_rounded_operands(scheme, rows):
    x, weight = operands(rows)
    leaves = FORMATS[scheme].quantize(jnp.asarray(weight))
    assert leaves["codes"].nbytes == {"w8a8": 67, "w4a8": 34}[scheme] * 24
    out = integer_product(jnp.asarray(x)[None], leaves, FORMATS[scheme], FLOAT32)[0]
    most = {"w8a8": 127, "w4a8": 7}[scheme]
    expected = rounded(x, 127, 1) @ rounded(weight, most, 0)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_rounded_products_of_training_have_the_bits_of_stored_integers():
    x, weight = map(jnp.asarray, operands())
    precision = Precision.of(PrecisionConfig(products="int8"))
    stored = integer_product(x, FORMATS["w8a8"].quantize(weight), FORMATS["w8a8"], FLOAT32)
    np.testing.assert_array_equal(matmul(x, weight, precision), stored)


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", FORMATS)
def test_gradients_pass_the_rounding(scheme):
    x, weight = map(jnp.asarray, operands())
    precision = Precision.of(PrecisionConfig(qat=scheme))
    out, pull = jax.vjp(lambda x, w: qat_matmul(x, w, precision), x, weight)
    format, grad = FORMATS[scheme], jnp.ones_like(out)
    dense = format.dequantize(format.quantize(weight), len(weight))
    x_grad, weight_grad = pull(grad)
    np.testing.assert_allclose(x_grad, grad @ dense.T, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(weight_grad, x.T @ grad, rtol=1e-5, atol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", ["w4a8", "w8a8", "int4"])
def test_a_model_that_is_trained_with_rounding_has_the_bits_of_the_stored_one(scheme):
    family = Llama(vocab=50, width=32, depth=1, heads=2, kv_heads=2, tied=False)
    precision = Precision.of(PrecisionConfig(qat=scheme))
    trained = Blueprint(family.build(), precision)
    params = draw_params(trained)
    settings = Quantized(base=scheme, block=FORMATS[scheme].block)
    surgeon = surgery.quantization(settings)
    stored = Blueprint(family.build(), Precision.float32(), surgery=surgeon)
    codes = surgery.adapted_params(
        Blueprint(family.build(), Precision.float32()), surgeon, params, jax.random.key(0)
    )
    ids = jnp.arange(8, dtype=jnp.int32)[None]

    def logits(blueprint, params, *, is_decoding):
        model = blueprint.merge(params)
        cache = None
        if is_decoding:
            model, cache = model.relayout_for_decode(), model.empty_cache(1, 8)
        return model.logits(model.hidden(ids, positions=ids, cache=cache).values)

    for is_decoding in (False, True):
        both = [
            jax.jit(lambda p, b=b, d=is_decoding: logits(b, p, is_decoding=d))(p)
            for b, p in ((trained, params), (stored, codes))
        ]
        np.testing.assert_array_equal(*both)


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_bits_do_not_depend_on_the_devices_that_split_a_weight(scheme):
    mesh = Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("data", "tensor"))
    x, weight = operands(rows=4, inputs=64)
    leaves = FORMATS[scheme].quantize(jnp.asarray(weight))
    product = jax.jit(lambda x, leaves: integer_product(x, leaves, FORMATS[scheme], FLOAT32))
    split = jax.tree.map(
        lambda leaf: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(None, "tensor"))),
        leaves,
    )
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", None)))
    np.testing.assert_array_equal(product(placed, split), product(x, leaves))
