import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.ops.matmul import matmul
from tests.models.parameters import draw_params


def operands(rows=(2, 5), outs=8):
    x, weight = jax.random.split(jax.random.key(0))
    return jax.random.normal(x, (*rows, 16)), jax.random.normal(weight, (16, outs))


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("compute", "within"), [("float32", 1e-5), ("bfloat16", 2e-2), ("float16", 5e-3)]
)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("rows", "outs"), [((2, 5), 8), ((2, 5), 2), ((1, 1), 8)], ids=["ten rows", "narrow", "one row"]
)
def test_the_product_and_its_gradients_are_those_of_numpy(compute, within, side, rows, outs):
    """Also where the gradient is transposed afterwards, as optimizers do."""
    precision = Precision.of(PrecisionConfig(compute=compute))
    x, weight = operands(rows, outs)

    def product(x, weight):
        return matmul(x, weight.T if side else weight, precision, side=side)

    @jax.jit
    def all_of(x, weight, grad):
        out, pull = jax.vjp(product, x, weight)
        return out, *pull(grad)

    grad = jax.random.normal(jax.random.key(1), (*rows, outs))
    out, x_grad, weight_grad = all_of(x, weight, grad)
    x, weight, grad = (np.asarray(each, np.float64) for each in (x, weight, grad))
    for actual, expected in (
        (out, x @ weight),
        (x_grad, grad @ weight.T),
        (weight_grad, np.einsum("bti,bto->io", x, grad)),
    ):
        np.testing.assert_allclose(actual, expected, atol=within * np.abs(expected).max())


def test_a_gradient_on_several_devices_sums_its_parts_and_gathers_no_tokens():
    kinds = (jax.sharding.AxisType.Auto,) * 2
    grid = jax.make_mesh((2, 2), ("data", "tensor"), kinds, devices=jax.devices()[:4])
    precision = Precision.of(PrecisionConfig(compute="bfloat16"))
    x, weight = (
        jax.device_put(array, jax.NamedSharding(grid, jax.P(*axes)))
        for array, axes in zip(operands(), (("data",), (None, "tensor")), strict=True)
    )
    with jax.set_mesh(grid):
        grads = jax.jit(jax.grad(lambda x, w: (matmul(x, w, precision) ** 2).sum(), (0, 1)))
        program = grads.lower(x[:, :4], weight).compile().as_text()
    assert "all-reduce" in program
    assert "all-gather" not in program


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_low_precision_multiplies_in_every_product_of_both_passes(backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    precision = Precision.of(PrecisionConfig(compute="bfloat16"))
    x, weight = operands()
    x = x.astype(precision.activations)
    program = jax.make_jaxpr(jax.grad(lambda x, w: matmul(x, w, precision).sum(), (0, 1)))(
        x, weight
    )
    products = [eqn for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    assert len(products) == 3
    assert {str(v.aval.dtype) for eqn in products for v in eqn.invars} == {"bfloat16"}
    assert [str(v.aval.dtype) for v in program.jaxpr.outvars] == [str(x.dtype), "float32"]


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_not_rounded_where_activations_are_bfloat16(tied, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    family = Llama(vocab=50, width=32, depth=1, heads=2, kv_heads=2, tied=tied)
    blueprint = Blueprint(family.build(), Precision.of(PrecisionConfig(compute="bfloat16")))
    model = blueprint.merge(draw_params(blueprint))
    ids = jnp.arange(8, dtype=jnp.int32)[None]
    hidden = model.hidden(ids, positions=ids).values
    assert hidden.dtype == jnp.bfloat16
    logits = model.logits(hidden)
    assert logits.dtype == jnp.float32
    rounded = logits.astype(jnp.bfloat16).astype(jnp.float32)
    assert float((rounded == logits).mean()) < 0.1
