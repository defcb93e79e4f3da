"""PPO: the losses of policy and value with their gradients against float64 formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.data.batch import Rollout, Tokens
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.models.heads import add_value_head
from jaxlm.objectives.build import build
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.policy import DrawnScores
from jaxlm.objectives.policy_config import Ppo
from jaxlm.objectives.ppo import ProximalPolicy

pytestmark = pytest.mark.usefixtures("one_device")

ROWS, SLOTS, VOCAB = 3, 8, 64
FAMILY = Llama(vocab=VOCAB, width=16, depth=1, heads=2, kv_heads=1, hidden=32)
DRAW = np.random.default_rng(0)
SETTINGS = Ppo(value_weight=0.7, value_clip=0.3, clip_high=0.28)


@pytest.fixture(scope="module")
def model():
    """A model whose value head is not 0, and its parameters."""
    blueprint = Blueprint(FAMILY.build(), Precision.float32(), surgery=add_value_head)
    params = blueprint.init(jax.random.key(0))
    assert not np.asarray(params["value"]["weight"]).any()  # as it begins
    weight = jnp.asarray(DRAW.normal(size=16), jnp.float32)
    return blueprint, {**params, "value": {"weight": weight}}


@pytest.fixture(scope="module")
def batch(model):
    ids = DRAW.integers(0, VOCAB, (ROWS, SLOTS + 1)).astype(np.int32)
    at = np.broadcast_to(np.arange(SLOTS), (ROWS, SLOTS))
    is_drawn = (at >= [[1], [3], [2]]) & (at < [[6], [8], [3]])
    fields = ids[:, :-1], ids[:, 1:], is_drawn.astype(np.float32), np.ones_like(at), at
    tokens = Tokens(*(jnp.asarray(x, x.dtype.name.replace("64", "32")) for x in fields))
    blueprint, params = model
    scores, _ = jax.jit(
        lambda p: build(SETTINGS, LossConfig()).score(blueprint.merge(p), tokens, None)
    )(params)
    noise = [np.where(is_drawn, DRAW.normal(size=at.shape), 0) for _ in range(4)]
    old, value = np.asarray(scores.log_p) + 0.4 * noise[0], np.asarray(scores.value)
    columns = [
        *(np.where(is_drawn, old, 0), noise[1], is_drawn),
        *(np.where(is_drawn, value + 0.4 * noise[2], 0), np.where(is_drawn, value + noise[3], 0)),
    ]
    return tokens._replace(rollout=Rollout(*(jnp.asarray(x, jnp.float32) for x in columns)))


def by_formula(log_p, value, batch):
    is_drawn = np.asarray(batch.weights > 0)
    old = {n: np.asarray(x, np.float64) for n, x in batch.rollout._asdict().items()}
    ratio = np.exp(np.where(is_drawn, log_p - old["log_p"], 0))
    policy = -np.minimum(ratio * old["advantages"], np.clip(ratio, 0.8, 1.28) * old["advantages"])
    near = np.clip(value, old["values"] - 0.3, old["values"] + 0.3)
    error = 0.5 * np.maximum((value - old["returns"]) ** 2, (near - old["returns"]) ** 2)
    return (policy + 0.7 * error)[is_drawn].sum() / is_drawn.sum()


def test_loss_and_gradient_are_those_of_the_formula(model, batch):
    """The gradient is that of log-probabilities and values, times the formula's slopes."""
    (blueprint, params), objective = model, build(SETTINGS, LossConfig())

    def loss(params):
        part = objective.loss(blueprint.merge(params), batch, None)
        return part.objective.value, part

    def scored(params):
        scores, _ = objective.score(blueprint.merge(params), batch, None)
        return scores.log_p, scores.value

    (value, part), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    scores, pull = jax.vjp(jax.jit(scored), params)
    scores = [np.asarray(each, np.float64) for each in scores]
    assert float(value) == pytest.approx(by_formula(*scores, batch), rel=2e-5)
    slopes = []
    for which in range(2):
        slope = np.zeros_like(scores[0])
        for place in zip(*np.nonzero(np.asarray(batch.weights)), strict=True):
            moved = [[x.copy() for x in scores] for _ in range(2)]
            moved[0][which][place] += 1e-6
            moved[1][which][place] -= 1e-6
            slope[place] = (by_formula(*moved[0], batch) - by_formula(*moved[1], batch)) / 2e-6
        slopes.append(jnp.asarray(slope, jnp.float32))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-6),
        gradient,
        pull(tuple(slopes))[0],
    )
    figures = {name: float(mean.value) for name, mean in part.metrics.items()}
    assert figures["loss_nats"] == pytest.approx(
        figures["policy_loss"] + 0.7 * figures["value_loss"], rel=1e-5
    )
    assert 0 < figures["value_clipped_share"] < 1


class Given(ProximalPolicy):
    """Learns from scores that are given in place of a model."""

    def score(self, model, batch, key):
        return model, {}


def test_a_penalty_is_in_the_rewards_or_in_the_loss(batch):
    """The advantages of a batch have that of `reward_k1`, so that the loss must not add it."""
    log_p, log_q, value = (
        jnp.asarray(DRAW.normal(size=(ROWS, SLOTS)), jnp.float32) - 3 for _ in "pqv"
    )
    scores, reference = DrawnScores(log_p, 0 * log_p, value), DrawnScores(log_q, 0 * log_q)
    losses = {
        kl: float(
            Given(Ppo(kl=kl, reference="runs/a", beta=0.5), LossConfig())
            .loss(scores, batch, None, None if kl == "none" else reference)
            .objective.value
        )
        for kl in ("none", "reward_k1", "loss_k3")
    }
    assert losses["reward_k1"] == losses["none"]
    gap = np.asarray(log_q - log_p, np.float64)[np.asarray(batch.weights > 0)]
    added = 0.5 * (np.exp(gap) - 1 - gap).mean()
    assert losses["loss_k3"] - losses["none"] == pytest.approx(added, rel=1e-3)
