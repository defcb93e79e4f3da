import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.ops.matmul import matmul


def operands():
    x, weight = jax.random.split(jax.random.key(0))
    return jax.random.normal(x, (2, 5, 16)), jax.random.normal(weight, (16, 8))


def test_the_product_and_its_gradients_are_those_of_numpy():
    x, weight = operands()
    out, pull = jax.vjp(lambda x, w: matmul(x, w, Precision.float32()), x, weight)
    grad = jax.random.normal(jax.random.key(1), out.shape)
    x_grad, weight_grad = pull(grad)
    np.testing.assert_allclose(out, np.asarray(x) @ np.asarray(weight), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(x_grad, np.asarray(grad) @ weight.T, rtol=1e-5, atol=1e-5)
    expected = np.einsum("bti,bto->io", x, grad)
    np.testing.assert_allclose(weight_grad, expected, rtol=1e-5, atol=1e-5)


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
    model = blueprint.merge(blueprint.init(jax.random.key(0)))
    ids = jnp.arange(8, dtype=jnp.int32)[None]
    hidden = model(ids, positions=ids).values
    assert hidden.dtype == jnp.bfloat16
    logits = model.logits(hidden)
    assert logits.dtype == jnp.float32
    rounded = logits.astype(jnp.bfloat16).astype(jnp.float32)
    assert float((rounded == logits).mean()) < 0.1
