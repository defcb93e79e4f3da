"""Splash attention is attention: outputs and gradients against float64, also on a mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import backend
from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.ops import masks
from jaxlm.ops.attention import attention
from jaxlm.ops.splash import splash
from jaxlm.parallel import mesh, rules
from jaxlm.parallel.config import MeshConfig
from tests.ops.float64 import SCALE, exact, operands, segments_of

FULL = Precision.float32()
LOW = Precision.of(PrecisionConfig(compute="bfloat16"))
interpreted = functools.partial(splash, interpret=True)


def weighed(kernel, mask, compute, softcap, query, key, value, weights):
    """sum of out x weights, and the outputs.

    Args:
      kernel, mask: the kernel and its mask.
      compute: dtype of the products.
      softcap: limit of the scores.
      query, key, value: operands.
      weights: factors of the outputs in the sum.
    """
    out = kernel(query, key, value, mask, compute, scale=SCALE, softcap=softcap)
    return (out * weights).sum(), out


def graded(kernel, mask, compute, softcap, arrays):
    """The result and its gradients by queries, keys and values.

    Args:
      kernel, mask: the kernel and its mask.
      compute: dtype of the products.
      softcap: limit of the scores.
      arrays: queries, keys, values and weights.
    """
    run = functools.partial(weighed, kernel, mask, compute, softcap)
    differentiated = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))
    (_, out), grads = differentiated(*arrays)
    return out, *grads


def plain(query, key, value, mask, compute, *, scale, softcap):
    precision = dataclasses.replace(FULL, compute=compute)
    return attention(query, key, value, mask, precision, scale=scale, softcap=softcap)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "size", "causal", "window", "softcap", "is_packed"),
    [
        (128, 2, 2, 8, True, None, None, False),
        (128, 4, 2, 8, True, None, None, True),
        (128, 3, 1, 8, True, 5, 2.0, True),
        (256, 2, 2, 64, True, 3, None, False),
        (256, 2, 1, 8, False, None, None, True),
        (640, 2, 1, 8, True, 200, None, True),  # blocks of 128, some hidden by a window
        (640, 1, 1, 8, False, 150, 1.5, False),
    ],
)
def test_outputs_and_gradients_are_those_of_float64(
    length, heads, kv_heads, size, causal, window, softcap, is_packed
):
    segments = segments_of(length) if is_packed else None
    arrays = operands(length, heads, kv_heads, size=size)
    expected = exact(*arrays, causal=causal, window=window, softcap=softcap, segments=segments)
    mask = dataclasses.replace(masks.causal(length, segments), causal=causal, window=window)
    low = [jnp.asarray(x, jnp.float32) for x in arrays]
    got = graded(interpreted, mask, jnp.float32, softcap, low)
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5 * max(1.0, np.abs(one).max()))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("window", "is_packed"), [(None, False), (40, True)])
def test_in_low_precision_it_is_as_near_to_float64_as_the_reference(window, is_packed):
    segments = segments_of(256) if is_packed else None
    arrays = operands(256, 4, 2, size=8)
    expected = exact(*arrays, causal=True, window=window, softcap=None, segments=segments)
    mask = dataclasses.replace(masks.causal(256, segments), window=window)
    # As activations are on a TPU; the weights only sum.
    low = [jnp.asarray(x, jnp.bfloat16) for x in arrays[:3]] + [jnp.asarray(arrays[3], jnp.float32)]
    near = graded(interpreted, mask, LOW.compute, None, low)
    known = graded(plain, mask, LOW.compute, None, low)
    for exactly, kernel, whole in zip(expected, near, known, strict=True):
        error, usual = (np.abs(np.asarray(x, np.float64) - exactly).max() for x in (kernel, whole))
        assert 0 < error <= 1.5 * usual


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 2, "tensor": 2}, {"data": 2, "pipe": 2}], ids=["split", "some copies"]
)
def test_on_a_mesh_each_device_computes_its_rows_and_heads(sizes):
    arrays = [jnp.asarray(x, jnp.float32) for x in operands(128, 4, 2, size=8)]
    mask = masks.causal(128, jnp.asarray(segments_of(128)))
    alone = graded(interpreted, mask, jnp.float32, None, arrays)
    grid = mesh.build(MeshConfig(**{"data": 1} | sizes), jax.devices()[:4])
    place = jax.NamedSharding(grid, rules.spec(("batch", "length", "heads", "head_dim")))
    with jax.set_mesh(grid):
        arrays = [jax.device_put(x, place) for x in arrays]
        split = graded(interpreted, mask, jnp.float32, None, arrays)
    for one, other in zip(alone, split, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
        assert other.sharding.is_equivalent_to(place, 4)


@pytest.mark.slow
def test_stages_of_a_pipeline_compute_it_at_once():
    """Mapped over stages as in `parallel.pipeline`, with parts on the devices of an axis."""
    arrays = [
        jnp.stack([jnp.asarray(x, jnp.float32) for x in both])
        for both in zip(*(operands(128, 2, 1, size=8, seed=seed) for seed in (0, 1)), strict=True)
    ]
    mask = masks.causal(128, jnp.asarray(segments_of(128)))

    def staged(query, key, value, weights):
        run = functools.partial(weighed, interpreted, mask, jnp.float32, None)
        total, out = jax.vmap(run, spmd_axis_name="pipe")(query, key, value, weights)
        return total.sum(), out

    differentiated = jax.jit(jax.value_and_grad(staged, argnums=(0, 1, 2), has_aux=True))
    with jax.set_mesh(mesh.build(MeshConfig(data=2, pipe=2), jax.devices()[:4])):
        (_, out), grads = differentiated(*arrays)
    for stage in range(2):
        alone = graded(interpreted, mask, jnp.float32, None, [x[stage] for x in arrays])
        for one, other in zip(alone, (out, *grads), strict=True):
            np.testing.assert_allclose(other[stage], one, rtol=1e-5, atol=1e-5)


def test_values_of_another_size_than_keys_are_filled_up(monkeypatch):
    arrays = [jnp.asarray(x, jnp.float32) for x in operands(128, 2, 2)]
    query, key, value = arrays[0], arrays[1], arrays[2][..., :5]
    call = functools.partial(attention, query, key, value, masks.causal(128), FULL, scale=SCALE)
    monkeypatch.setattr("jaxlm.ops.splash.splash", interpreted)
    with backend.compiling_for("tpu"):
        out = call(kernel="splash")
    np.testing.assert_allclose(out, call(), rtol=1e-4, atol=1e-5)


def test_what_it_cannot_do_is_refused():
    query, key, value, _ = (jnp.asarray(x, jnp.float32) for x in operands(128, 2, 2))
    slots = jnp.arange(128)[None]
    cache = masks.Mask(query_index=slots, key_index=slots)
    call = functools.partial(attention, precision=FULL, scale=1.0, kernel="splash")
    with pytest.raises(ValueError, match="splash attention does not run on a cpu"):
        call(query, key, value, masks.causal(128))
    with backend.compiling_for("tpu"):
        with pytest.raises(ValueError, match="needs a mask of whole rows"):
            call(query, key, value, cache)
        with pytest.raises(ValueError, match="no bidirectional segments"):
            call(
                query,
                key,
                value,
                masks.causal(128, visible_until=jnp.zeros((2, 128), jnp.int32) + 127),
            )
        with pytest.raises(ValueError, match="of 100 tokens, no multiple of 128"):
            call(*(x[:, :100] for x in (query, key, value)), masks.causal(100))
        with pytest.raises(ValueError, match="splash has no attention dropout"):
            call(query, key, value, masks.causal(128), dropout=0.1, dropout_key=jax.random.key(0))
        grid = mesh.build(MeshConfig(data=1, context=4), jax.devices()[:4])
        with jax.set_mesh(grid), pytest.raises(ValueError, match="needs whole rows"):
            call(query, key, value, masks.causal(128))
