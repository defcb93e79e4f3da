"""Regularization in training, against numpy and by statistics; without a key it is off."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.config import DecoderConfig, RegularizationConfig
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.nn.dropout import layer_drop, noise
from tests.models.parameters import draw_params
from tests.nn.test_stack import KEY, LENGTH, PLAIN, ROWS, WIDTH, made, run


def test_a_row_passes_by_a_layer_at_the_rate_and_the_mean_stays():
    draw = np.random.default_rng(0)
    x, after = draw.standard_normal((2, 4000, 3, 2))
    rate = np.float32(0.3)
    out = np.asarray(layer_drop(*map(jnp.asarray, (x, after, rate)), jax.random.key(0)))
    passed = (out == x.astype(np.float32)).all((1, 2))
    np.testing.assert_allclose(out[~passed], (x + (after - x) / 0.7)[~passed], rtol=1e-4, atol=1e-5)
    assert abs(passed.mean() - 0.3) < 0.03


def test_noise_is_uniform_within_its_bound_and_off_without_a_key():
    x = jnp.zeros((2, 64, 32))
    bound = 5.0 / np.sqrt(64 * 32)
    out = np.asarray(noise(x, 5.0, jax.random.key(0)))
    assert np.abs(out).max() <= bound
    np.testing.assert_allclose(out.std(), bound / np.sqrt(3), rtol=0.03)
    assert noise(x, 5.0, None) is x
    assert noise(x, 0.0, jax.random.key(0)) is x


def dropping(drops, depth=3, **options):
    stack = made(depth, (PLAIN,), **options)
    stack.drops = drops
    return stack


@pytest.fixture(scope="module")
def whole():
    return np.asarray(run(made(3, (PLAIN,))))


@pytest.mark.slow
def test_a_layer_that_every_row_passes_by_might_as_well_not_be_there(whole):
    key = jax.random.key(3)
    without = dropping((1e-9, 1e-9, 1 - 1e-6))
    shallow = made(3, (PLAIN,), layers="unroll")
    shallow.depth, shallow.layers = 2, "unroll"
    first = jax.tree.map(lambda x: x, shallow)
    x = np.asarray(run(without, key=key))
    assert np.abs(x - whole).max() > 0.01
    np.testing.assert_allclose(x, run(first), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(run(without), whole)


@pytest.mark.slow
def test_scan_and_unroll_pass_by_the_same_layers(whole):
    drops = (0.2, 0.5, 0.7)
    one, other = (
        np.asarray(run(dropping(drops, layers=layers), key=KEY)) for layers in ("scan", "unroll")
    )
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert np.abs(one - whole).max() > 0.01


@pytest.mark.slow
def test_embeddings_are_dropped_at_their_rate_and_the_mean_stays():
    """Seen behind a block that adds nothing."""
    plain = GPT2(vocab=64, width=32, depth=1, heads=2, max_positions=16, dropout=0.0).build()
    model = RegularizationConfig(embedding_dropout=0.3).applied(plain)
    blueprint = Blueprint(model, Precision.float32())
    params = draw_params(blueprint)
    params["stack"] = jax.tree.map(jnp.zeros_like, params["stack"])
    tokens = np.random.default_rng(0).integers(0, 64, (8, 16))
    positions = np.broadcast_to(np.arange(16), (8, 16))

    def stream(key):
        return np.asarray(
            blueprint.merge(params).hidden(tokens, positions=positions, key=key).stream
        )

    tables = [np.asarray(params[name]["table"]) for name in ("embedding", "positions")]
    whole = tables[0][tokens] + tables[1][positions]
    np.testing.assert_allclose(stream(None), whole, rtol=1e-6)
    dropped = stream(jax.random.key(1))
    remaining = dropped != 0
    np.testing.assert_allclose(dropped[remaining], (whole / 0.7)[remaining], rtol=1e-5)
    assert abs(remaining.mean() - 0.7) < 0.03


def test_each_kind_of_dropout_has_its_rate_and_depth_has_its_line():
    model = GPT2(vocab=64, width=WIDTH, depth=4, heads=2, max_positions=LENGTH, dropout=0.1).build()
    assert RegularizationConfig().applied(model) == model
    settings = RegularizationConfig(
        attention_dropout=0.0, residual_dropout=0.2, embedding_dropout=0.3
    )
    dropout = settings.applied(model)
    (block,) = dropout.pattern
    assert (dropout.dropout, block.attention.dropout, block.dropout) == (0.3, 0.0, 0.2)
    deep = dataclasses.replace(model, layer_drop=0.4)
    module = Blueprint(deep, Precision.float32()).merge(Blueprint(deep, Precision.float32()).shapes)
    np.testing.assert_allclose(module.stack.drops, (0.1, 0.2, 0.3, 0.4))


def test_a_model_without_a_key_has_no_noise_and_drops_no_layer():
    quiet = DecoderConfig(vocab=16, width=WIDTH, depth=2, pattern=(PLAIN,), init_std=0.3)
    loud = dataclasses.replace(quiet, embedding_noise=5.0, layer_drop=0.5)
    tokens = np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH) % 16
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32)[None], tokens.shape)

    def values_of(config):
        blueprint = Blueprint(config, Precision.float32())
        params = draw_params(blueprint)

        @jax.jit
        def values(key):
            return blueprint.merge(params).hidden(tokens, positions=positions, key=key).values

        return lambda key: np.asarray(values(key))

    still, noisy = values_of(quiet), values_of(loud)
    np.testing.assert_array_equal(still(None), noisy(None))
    assert np.abs(still(KEY) - noisy(KEY)).max() > 0.01
    np.testing.assert_array_equal(noisy(KEY), noisy(KEY))
