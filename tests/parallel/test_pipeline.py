"""The loop over stages against plain Python."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.parallel import mesh, pipeline
from jaxlm.parallel.config import MeshConfig
from jaxlm.parallel.schedule import Schedule


def test_rows_come_back_in_their_order():
    x = jnp.arange(24).reshape(12, 2)
    split = pipeline.split_microbatches(x, 3)
    np.testing.assert_array_equal(split[1], x[1::3])
    np.testing.assert_array_equal(pipeline.merge_microbatches(split), x)


@jax.custom_vjp
def counted(x, microbatch):
    """`x`, noting forward and backward which micro-batch it was, wherever that is computed."""
    jax.debug.callback(lambda m: FORWARD.append(int(m)), microbatch)
    return x


def _forward(x, microbatch):
    return counted(x, microbatch), microbatch


def _backward(microbatch, gradient):
    jax.debug.callback(lambda m: BACKWARD.append(int(m)), microbatch)
    return gradient, None


counted.defvjp(_forward, _backward)
FORWARD, BACKWARD = [], []


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", [Schedule(4, 6), Schedule(4, 5, 2), Schedule(2, 3, 2)], ids=str)
def test_stages_are_run_as_often_as_predicted_and_in_the_order_of_the_layers(plan, record_property):
    """On four devices, in stages and replicas: every execution is counted, both ways."""
    layers = 2 * plan.stages * plan.repeats
    weights = jnp.arange(1.0, layers + 1) / layers
    x = jax.random.normal(jax.random.key(0), (plan.microbatches, 2, 3, 4))
    FORWARD.clear()
    BACKWARD.clear()

    def stage(weights, x, microbatch):
        x = counted(x, microbatch)
        for weight in weights:
            x = jnp.sin(x) * weight + microbatch
        return x, {"layers": jnp.float32(len(weights)), "microbatch": microbatch}

    def loss(weights, x):
        out, sums = pipeline.run_pipeline(stage, weights, x, plan)
        return jnp.square(out).sum(), (out, sums)

    def plain(weights, x):
        def one(x, number):
            for weight in weights:
                x = jnp.sin(x) * weight + number
            return x

        out = jnp.stack([one(x, number) for number, x in enumerate(x)])
        return jnp.square(out).sum(), out

    grid = mesh.build(MeshConfig(data=4 // plan.stages, pipe=plan.stages), jax.devices()[:4])
    with jax.set_mesh(grid):
        (_, (out, sums)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights, x)
        jax.effects_barrier()
    (_, expected), known = jax.value_and_grad(plain, has_aux=True)(weights, x)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, known, rtol=1e-4, atol=1e-5)
    # Sums are over all stages and micro-batches, and over nothing else.
    useful = plan.stages * plan.repeats * plan.microbatches
    assert float(sums["layers"]) == 2 * useful
    assert int(sums["microbatch"]) == sum(range(plan.microbatches)) * useful // plan.microbatches
    assert len(FORWARD) == len(BACKWARD) == plan.ticks * plan.stages
    assert collections.Counter(FORWARD) == collections.Counter(BACKWARD)
    counted_bubble = 1 - useful / len(FORWARD)
    record_property(
        "table", f"{plan}: bubble {plan.bubble:.1%} predicted, {counted_bubble:.1%} counted"
    )
    assert counted_bubble == pytest.approx(plan.bubble)
