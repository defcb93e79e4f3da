"""Products of rounded operands, and a reference that rounds in NumPy and multiplies in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.ops import quantize
from jaxlm.ops.matmul import matmul
from tests.models.parameters import draw_params

ROWS, INS, OUTS = 24, 48, 32


def operands(seed=0):
    """Inputs with an outlier feature, as in trained models; a weight; a gradient of the result."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(2, ROWS // 2, INS)).astype(np.float32)
    x[..., 3] *= 30
    weight = (draw.normal(size=(INS, OUTS)) / 7).astype(np.float32)
    grad = (draw.normal(size=(2, ROWS // 2, OUTS)) * 1e-5).astype(np.float32)
    return x, weight, grad


def int8(x, axis):
    """A row or column after rounding to 127 steps each way, in float64."""
    scale = np.abs(x).max(axis=axis, keepdims=True).astype(np.float64) / 127
    return np.round(x / scale) * scale


def fp8(x, dtype, largest):
    scale = float(np.abs(x).max()) / largest
    return (x / np.float32(scale)).astype(dtype).astype(np.float64) * scale


def expected(products):
    """The result and both gradients: each from operands rounded for it alone."""
    x, weight, grad = (a.reshape(-1, a.shape[-1]) for a in operands())
    if products == "int8":
        exact = x.astype(np.float64).T @ grad.astype(np.float64)
        return int8(x, 1) @ int8(weight, 0), int8(grad, 1) @ int8(weight, 1).T, exact
    x, weight = (fp8(a, ml_dtypes.float8_e4m3fn, 448) for a in (x, weight))
    grad = fp8(grad, ml_dtypes.float8_e5m2, 57344)
    return x @ weight, grad @ weight.T, x.T @ grad


def found(products, **settings):
    precision = Precision.of(PrecisionConfig(products=products, **settings))
    x, weight, grad = map(jnp.asarray, operands())
    out, pull = jax.vjp(lambda x, w: matmul(x, w, precision), x, weight)
    return out, *pull(grad)


@pytest.mark.few(1)
@pytest.mark.parametrize("products", ["int8", "fp8"])
def test_all_three_products_are_those_of_the_rounded_operands(products):
    for ours, theirs in zip(found(products), expected(products), strict=True):
        ours = np.asarray(ours, np.float64).reshape(theirs.shape)
        error = np.abs(ours - theirs).max() / np.abs(theirs).max()
        assert error < 2e-6, error


@pytest.mark.few(1)
@pytest.mark.parametrize(("products", "least", "most"), [("int8", 1e-3, 0.02), ("fp8", 1e-3, 0.05)])
def test_rounding_is_there_and_small(products, least, most):
    x, weight, _ = operands()
    exact = x.astype(np.float64) @ weight.astype(np.float64)
    error = np.linalg.norm(found(products)[0] - exact) / np.linalg.norm(exact)
    assert least < error < most


def test_the_operands_of_the_program_are_of_eight_bits():
    for products, kinds in (
        ("int8", ["int8 int8", "int8 int8", "bfloat16 bfloat16"]),
        (
            "fp8",
            [
                "float8_e4m3fn float8_e4m3fn",
                "float8_e5m2 float8_e4m3fn",
                "float8_e4m3fn float8_e5m2",
            ],
        ),
    ):
        precision = Precision.of(PrecisionConfig(compute="bfloat16", products=products))
        x, weight, _ = operands()

        def total(x, w, precision=precision):
            return matmul(x, w, precision).sum()

        program = jax.make_jaxpr(jax.grad(total, (0, 1)))
        dots = [e for e in program(x, weight).eqns if e.primitive.name == "dot_general"]
        assert [" ".join(str(v.aval.dtype) for v in e.invars) for e in dots] == kinds


@pytest.mark.few(2)
@pytest.mark.parametrize("format", [quantize.INT8, quantize.E4M3, quantize.E5M2])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(format, value):
    x, weight, _ = operands()
    x = jnp.asarray(x[0]).at[2, 5].set(value)
    out = quantize.dot(x, jnp.asarray(weight), ((1,), (0,)), (format, format), jnp.dtype("float32"))
    assert not np.isfinite(out[2]).any()


@pytest.mark.parametrize("format", [quantize.INT8, quantize.E4M3, quantize.E5M2])
def test_zeros_and_extremes_are_kept(format):
    x = jnp.asarray([[0.0, 0.0], [3e38, -3e38], [1e-30, -1e-30]], jnp.float32)
    for rows in (x[:1], x[1:2], x[2:]):
        low, scale = quantize.rounded(rows, format, (1,))
        back = low.astype(jnp.float32) * scale
        np.testing.assert_allclose(back, rows, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("products", ["int8", "fp8"])
def test_scales_are_those_of_whole_rows_and_tensors_where_devices_split_them(products):
    grid = Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("data", "tensor"))
    precision = Precision.of(PrecisionConfig(products=products))
    x, weight, grad = operands()

    @jax.jit
    def both(x, weight, grad):
        out, pull = jax.vjp(lambda x, w: matmul(x, w, precision), x, weight)
        return out, *pull(grad)

    whole = both(x, weight, grad)
    places = (("data", None, "tensor"), ("tensor", None), ("data", None, None))
    split = [
        jax.device_put(value, NamedSharding(grid, PartitionSpec(*place)))
        for value, place in zip((x, weight, grad), places, strict=True)
    ]
    for ours, theirs in zip(both(*split), whole, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6 * float(abs(theirs).max()))


def test_only_the_projections_of_layers_are_rounded():
    family = Llama(vocab=50, width=32, depth=1, heads=2, kv_heads=2, tied=False)
    blueprint = Blueprint(family.build(), Precision.of(PrecisionConfig(products="int8")))
    params = draw_params(blueprint)
    ids = jnp.arange(8, dtype=jnp.int32)[None]

    def logits(params):
        model = blueprint.merge(params)
        return model.logits(model.hidden(ids, positions=ids).values)

    text = str(jax.make_jaxpr(logits)(params))
    # Query, key, value, out, gate, up, down; two products of attention and the logits are not.
    assert text.count("preferred_element_type=int32") == 7
    assert text.count("dot_general[") == 10
