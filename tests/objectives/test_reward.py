"""Reward models: the loss against float64, and scores in every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.heads import add_reward_head
from jaxlm.objectives.build import build
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.preference_config import Reward
from jaxlm.objectives.reward import score_texts
from tests.models.parameters import draw_params
from tests.objectives.test_preference import FAMILY, IDS, rows

CENTER = 0.3
pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def blueprint():
    return Blueprint(FAMILY.build(), Precision.float32(), surgery=add_reward_head)


@pytest.fixture(scope="module")
def params(blueprint):
    params = draw_params(blueprint)
    weight = np.random.default_rng(1).standard_normal(FAMILY.width)
    params["reward"]["weight"] = weight.astype(np.float32)
    return params


@pytest.fixture(scope="module")
def loss(blueprint):
    objective = build(Reward(center=CENTER), LossConfig())

    def of(params, batch):
        part = objective.loss(blueprint.merge(params), batch, None)
        return part.objective.total, part

    return jax.jit(jax.value_and_grad(of, has_aux=True))


@pytest.fixture(scope="module")
def scores(blueprint, params):
    """Score of each answer alone in its row, in float64 from its stream."""

    @jax.jit
    def stream(params, ids):
        model = blueprint.merge(params)
        return model.hidden(ids, positions=jnp.arange(ids.shape[1])[None]).values[0]

    weight = np.asarray(params["reward"]["weight"], np.float64)
    alone = [[np.asarray(stream(params, ids[None, :-1])[-1]) for ids in pair] for pair in IDS]
    return np.asarray(alone, np.float64) @ weight


def with_margins(batch, margin):
    answers = batch.answers
    return batch._replace(answers=answers._replace(margins=margin * (answers.sides != 0)))


@pytest.mark.slow
def test_packed_pairs_have_the_loss_of_their_scores_in_every_layout(loss, params, scores):
    gap, total = scores[:, 0] - scores[:, 1], scores.sum(1)
    expected = np.mean(np.logaddexp(0, 0.5 - gap) + CENTER * total**2)
    layouts = [
        [rows([[0, 1], [2]])],
        [rows([[2, 0], [1]], order=(1, 0))],
        [rows([[n], []]) for n in range(3)],
    ]
    for batches in layouts:
        parts = [loss(params, with_margins(batch, 0.5)) for batch in batches]
        assert sum(float(part.objective.weight) for (_, part), _ in parts) == 6
        value = sum(float(total) for (total, _), _ in parts) / 6
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        gradient = jax.tree.map(lambda *x: sum(x) / 6, *(grads for _, grads in parts))
        first = gradient if batches is layouts[0] else first
        for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(gradient), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)
    figures = {name: float(mean.value) for name, mean in parts[0][0][1].metrics.items()}
    np.testing.assert_allclose(figures["margin"], gap[0], rtol=1e-5)
    assert figures["preference_accuracy"] == (gap[0] > 0)
    assert (figures["chosen_tokens"], figures["rejected_tokens"]) == (6, 4)


def test_a_head_of_zeros_has_ln_2_and_swapped_sides_mirror_the_gap(loss, blueprint, params):
    fresh = draw_params(blueprint)
    fresh["reward"]["weight"] = np.zeros(FAMILY.width, np.float32)
    (_, part), grads = loss(fresh, rows([[0, 1], [2]]))
    assert float(part.objective.value) == pytest.approx(np.log(2), rel=1e-7)
    assert np.abs(grads["reward"]["weight"]).max() > 0
    batch = rows([[0, 1], [2]])
    swapped = batch._replace(answers=batch.answers._replace(sides=-batch.answers.sides))
    one, other = (loss(params, each)[0][1].metrics["margin"] for each in (batch, swapped))
    assert float(one.value) == pytest.approx(-float(other.value), rel=1e-6)


def test_a_score_is_that_of_the_last_slot_and_reads_no_other_text(blueprint, params, scores):
    scored = jax.jit(lambda batch: score_texts(blueprint.merge(params), batch, None, 32)[0])
    packed, apart = rows([[0, 1], [2]]), rows([[2], [1, 0]], length=64)
    flat = scores.ravel()
    np.testing.assert_allclose(scored(packed)[0, :4], flat[:4], rtol=1e-5)
    np.testing.assert_allclose(scored(apart)[1, :4], flat[[2, 3, 0, 1]], rtol=1e-5)
    assert np.all(scored(apart)[1, 4:] == 0)
