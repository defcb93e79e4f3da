"""Auxiliary losses of experts: one coefficient for any share of trained tokens."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Blueprint
from jaxlm.models.families.mistral import Mixtral
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.loss import token_nll
from jaxlm.training import gradient
from jaxlm.training.gradient import GradientSpec
from tests.models.parameters import draw_params

ROWS, LENGTH, VOCAB = 8, 16, 64
PLAIN = Mixtral(
    vocab=VOCAB, width=16, depth=1, heads=2, kv_heads=2, experts=4, hidden=16, balance_loss=0.0
)
ADDING = dataclasses.replace(PLAIN, balance_loss=0.5, router_z=0.1)
# Of all tokens but padding, as causal and masked have them.
ALL, MASKED = 1.0, 0.15


def batch(share):
    """Rows with a share of trained tokens, larger in the first rows; half end in padding."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    slots = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
    segments = np.ones((ROWS, LENGTH), np.int32)
    segments[::2, 12:] = 0
    rates = share * np.linspace(2, 0, ROWS)[:, None] if share < 1 else np.ones((ROWS, 1))
    weights = (segments > 0) & (draw.random((ROWS, LENGTH)) < rates)
    return Tokens(tokens[:, :-1], tokens[:, 1:], weights.astype(np.float32), segments, slots)


@functools.cache
def mean(model, share, microbatches=1):
    """The mean gradient of that batch, by leaf."""
    blueprint = Blueprint(model.build(), Precision.float32())

    def loss(params, batch, key):
        return token_nll(blueprint.merge(params), batch, None, LossConfig())

    of = gradient.build_gradient(
        GradientSpec(loss=loss, precision=Precision.float32(), microbatches=microbatches)
    )
    params = draw_params(blueprint, std=0.2)  # so large that routes are uneven
    grads, _, _ = jax.jit(of)(params, batch(share), jax.random.key(1), np.float32(1))
    return {path: np.asarray(leaf) for path, leaf in tree.leaves(grads).items()}


def added(share):
    """Contribution of the auxiliary losses to the gradient of the routers."""
    with_them, without = mean(ADDING, share), mean(PLAIN, share)
    (path,) = (path for path in with_them if path.endswith("router/weight"))
    return with_them[path] - without[path]


@pytest.mark.slow
def test_routers_feel_the_same_loss_under_objectives_that_train_on_few_tokens_and_on_all():
    """The same tokens take the same routes; 15% of them are trained on, or all."""
    few, every = batch(MASKED), batch(ALL)
    assert few.weights.sum() < 0.2 * every.weights.sum()
    size = np.abs(added(ALL)).max()
    assert size > 1e-2
    np.testing.assert_allclose(added(MASKED), added(ALL), atol=1e-4 * size)


@pytest.mark.slow
@pytest.mark.parametrize("share", [ALL, MASKED], ids=["causal", "masked"])
def test_micro_batches_of_uneven_weights_give_the_gradient_of_one_batch(share):
    whole, parts = mean(ADDING, share), mean(ADDING, share, microbatches=4)
    weights = batch(share).weights
    assert share == ALL or len({part.sum() for part in weights}) > 2, "the rows weigh unevenly"
    for path, leaf in whole.items():
        np.testing.assert_allclose(
            parts[path], leaf, atol=1e-5 * np.abs(leaf).max(), rtol=1e-4, err_msg=path
        )


@pytest.mark.slow
def test_a_batch_that_is_trained_on_whole_has_the_sum_of_both_losses_over_its_tokens():
    """Both losses are divided by the number of trained tokens."""
    blueprint = Blueprint(ADDING.build(), Precision.float32())
    params = draw_params(blueprint)
    loss = jax.jit(lambda p: token_nll(blueprint.merge(p), batch(ALL), None, LossConfig()))(params)
    assert loss.added.weight == loss.objective.weight == batch(ALL).weights.sum()
    together = (loss.objective.total + loss.added.total) / loss.objective.weight
    assert float(loss.value) == pytest.approx(float(together), rel=1e-6)
    assert float(loss.added.value) > 0.5
