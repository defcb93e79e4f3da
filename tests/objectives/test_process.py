"""Process reward models: the loss of steps against float64, packed and alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.heads import add_reward_head
from jaxlm.objectives.build import build
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.preference_config import Process
from tests.models.parameters import draw_params
from tests.objectives.test_preference import FAMILY, IDS, rows

ENDS = (3, 5)  # slots of a right and of a wrong step
pytestmark = pytest.mark.usefixtures("one_device")


def labeled(layout):
    """Rows of answers whose slots ENDS have labels, as far as an answer has such a slot."""
    batch = rows(layout)
    steps = sum(sign * (batch.positions == end) for end, sign in zip(ENDS, (1, -1), strict=True))
    steps = jnp.where(batch.segments > 0, steps, 0).astype(jnp.float32)
    return batch._replace(answers=None, steps=steps, weights=jnp.abs(steps))


@pytest.fixture(scope="module")
def blueprint():
    return Blueprint(FAMILY.build(), Precision.float32(), surgery=add_reward_head)


@pytest.fixture(scope="module")
def loss(blueprint):
    objective = build(Process(), LossConfig())

    def of(params, batch):
        part = objective.loss(blueprint.merge(params), batch, None)
        return part.objective.total, part

    return jax.jit(jax.value_and_grad(of, has_aux=True))


def test_packed_steps_have_the_loss_of_their_scores_alone(blueprint, loss):
    params = draw_params(blueprint)
    weight = np.random.default_rng(1).standard_normal(FAMILY.width)
    params["reward"]["weight"] = weight.astype(np.float32)

    @jax.jit
    def stream(ids):
        model = blueprint.merge(params)
        return model.hidden(ids, positions=jnp.arange(ids.shape[1])[None]).values[0]

    weight = np.asarray(params["reward"]["weight"], np.float64)
    signed = []
    for ids in (ids for pair in IDS for ids in pair):
        for end, sign in zip(ENDS, (1, -1), strict=True):
            if end < len(ids) - 1:
                # What follows the step has no effect.
                values = np.asarray(stream(ids[None, : end + 1])[-1], np.float64)
                signed.append(sign * (values @ weight))
    expected = np.mean(np.logaddexp(0, -np.array(signed)))
    for batches in ([labeled([[0, 1], [2]])], [labeled([[n], []]) for n in range(3)]):
        parts = [loss(params, batch)[0] for batch in batches]
        assert sum(float(part.objective.weight) for _, part in parts) == len(signed)
        np.testing.assert_allclose(
            sum(float(total) for total, _ in parts) / len(signed), expected, rtol=1e-5
        )
        metrics = [part.metrics["step_accuracy"] for _, part in parts]
        right = sum(float(each.total) for each in metrics)
        assert right == np.sum(np.array(signed) > 0)


def test_a_head_of_zeros_has_ln_2_and_learns(loss, blueprint):
    params = draw_params(blueprint)
    params["reward"]["weight"] = np.zeros(FAMILY.width, np.float32)
    (_, part), grads = loss(params, labeled([[0, 1], [2]]))
    assert float(part.objective.value) == pytest.approx(np.log(2), rel=1e-7)
    assert float(part.metrics["right_accuracy"].value) == 0.5
    assert np.abs(grads["reward"]["weight"]).max() > 0
