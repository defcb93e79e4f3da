"""8-bit moments: each number is rounded to one of the two nearest codes, without bias."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.optim import build as optim
from jaxlm.optim.adam_8bit import M_CODE, V_CODE, dequantize, quantize
from jaxlm.optim.config import AdamW, AdamW8bit
from jaxlm.optim.moments import blocks

BLOCK = (1, 64)


def spread(rng, shape=(4, 128)):
    """Numbers of six orders of magnitude."""
    return np.asarray(np.exp(rng.uniform(-14, 0, shape)), np.float32)


@pytest.mark.parametrize("code", [M_CODE, V_CODE], ids=["first", "second"])
def test_rounding_keeps_the_mean(code):
    rng = np.random.default_rng(0)
    x = jnp.asarray(spread(rng))
    if code is M_CODE:
        x = x * rng.choice([-1, 1], x.shape).astype(np.float32)
    noise = jnp.asarray(rng.uniform(size=(4000, *x.shape)), jnp.float32)
    back = jax.vmap(lambda each: dequantize(quantize(x, code, BLOCK, each), code, BLOCK))(noise)
    back = np.asarray(back, np.float64)
    error = back.mean(0) - x
    # Within five standard errors, or 2e-3 for roundings too rare for 4,000 draws. A second moment
    # below the first code is rounded to that code.
    floor = np.repeat(np.abs(x).reshape(4, 2, 64).max(2), 64, axis=1) / code.largest**code.power
    is_low = np.abs(x) < floor
    expected = np.where(is_low & (code is V_CODE), floor - x, 0.0)
    assert (np.abs(error - expected) <= 5 * back.std(0) / 4000**0.5 + 2e-3 * np.abs(x)).all()
    assert (back.std(0)[~is_low] > 0).mean() > 0.9, "nothing is at random"


@pytest.mark.parametrize("code", [M_CODE, V_CODE], ids=["first", "second"])
def test_a_number_is_kept_to_a_few_percent_of_itself_or_less_of_its_block(code):
    x = jnp.asarray(spread(np.random.default_rng(1)))
    back = dequantize(quantize(x, code, BLOCK, jnp.full(x.shape, 0.5)), code, BLOCK)
    scale = np.repeat(np.asarray(x).reshape(4, 2, 64).max(2), 64, axis=1)
    is_large = np.asarray(x) > 1e-2 * scale
    assert (np.abs(back - x)[is_large] < 0.06 * x[is_large]).all()
    assert (np.abs(back - x) <= 1e-3 * scale + 0.02 * x).all()


def test_no_second_moment_but_that_of_zero_gradients_becomes_zero():
    x = jnp.asarray([[1.0, 1e-20, 0.0, 1e-12]])
    coded = quantize(x, V_CODE, (1, 4), jnp.full(x.shape, 0.999))
    assert coded.codes.tolist() == [[255, 1, 0, 1]]
    empty = quantize(jnp.zeros((1, 4)), M_CODE, (1, 4), jnp.zeros((1, 4)))
    np.testing.assert_array_equal(dequantize(empty, M_CODE, (1, 4)), np.zeros((1, 4)))


def test_blocks_lie_along_a_dimension_that_fsdp_does_not_split():
    assert blocks((12, 64, 2048), ("layers", "embed", "mlp"), 256) == (2, 128)
    assert blocks((12, 2048, 64), ("layers", "mlp", "embed"), 256) == (1, 128)
    axes = ("layers", "embed", "heads", "head_dim")
    assert blocks((12, 64, 4, 96), axes, 64) == (3, 48)
    assert blocks((12, 64, 128, 64), axes, 256) == (3, 64), "shards of heads hold blocks of 8"
    assert blocks((12, 64, 24, 1), axes, 256) == (2, 3)
    assert blocks((50304, 768), ("vocab", "embed"), 256) is None
    assert blocks((12, 768), ("layers", "embed"), 256) is None
    assert blocks((12, 64, 16), ("layers", "embed", "mlp"), 256) is None, "a scale each"


@pytest.mark.few(2)
@pytest.mark.parametrize("hidden", [1536, 3072, 5632, 11008, 14336, 28672])
def test_no_block_crosses_from_shard_to_shard(hidden):
    _, size = blocks((64, hidden), ("embed", "mlp"), 256)
    assert size >= 96
    for shards in (1, 2, 4, 8, 16):
        assert hidden // shards % size == 0
        scales = AdamW8bit().state((64, hidden), ("embed", "mlp"), {"tensor": shards})[1]
        assert scales.axes == ("embed", "mlp")
        assert scales.shape[1] % shards == 0


def test_scales_that_a_mesh_cannot_split_are_whole_on_each_device():
    """And the shapes are those of every other mesh, so that a state moves from one to another."""
    uneven, even = (
        AdamW8bit().state((64, 1536), ("embed", "mlp"), {"tensor": n})[1] for n in (3, 4)
    )
    assert uneven.axes == ("embed", None)
    assert even.axes == ("embed", "mlp")
    assert uneven.shape == even.shape == (64, 16)


@pytest.mark.few(1)
def test_a_noisy_descent_ends_where_that_of_adamw_ends():
    """Least squares from noisy gradients whose sizes differ a thousandfold: the same error."""
    rng = np.random.default_rng(2)
    sizes = jnp.asarray(np.exp(rng.uniform(-7, 0, (16, 64))), jnp.float32)

    def distance(config):
        optimizer = optim.build(
            config, lambda step: 0.02 / (1 + 0.02 * step), {"w": ("embed", "mlp")}
        )

        def step(carry, key):
            params, state = carry
            noise = jax.random.normal(key, sizes.shape)
            updates, state = optimizer.update({"w": sizes * (params["w"] + noise)}, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = {"w": jnp.ones(sizes.shape)}
        keys = jax.random.split(jax.random.key(0), 400)
        (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), keys)
        return float(jnp.sqrt(jnp.mean(jnp.square(params["w"]))))

    free = {"weight_decay": 0.0, "clip_norm": None}
    whole, rounded = distance(AdamW(**free)), distance(AdamW8bit(**free, block=64))
    assert whole < 0.5
    assert rounded == pytest.approx(whole, rel=0.1)
