"""Samples are functions of prompt and key; rows and weights make the mean that is asked for."""

import jax
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.precision import Precision
from jaxlm.data.tokenizer import Bytes
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.objectives.build import build
from jaxlm.objectives.config import LossConfig, Policy
from jaxlm.objectives.policy import PolicyLearning
from jaxlm.rl.rollout import (
    Drawn,
    RolloutSampler,
    Weighted,
    allowed_ids,
    as_rows,
    root_key,
    row_keys,
)

pytestmark = pytest.mark.usefixtures("one_device")

VOCAB, MOST, TEMPERATURE = 320, 6, 0.6
TOKENIZER = Bytes()
PROMPTS = [np.arange(5, 5 + size, dtype=np.int32) for size in (2, 5, 3, 4, 2, 5)]


@pytest.fixture(scope="module")
def blueprint():
    family = Llama(vocab=VOCAB, width=16, depth=1, heads=2, kv_heads=1, hidden=32)
    return Blueprint(family.build(), Precision.float32())


@pytest.fixture(scope="module")
def params(blueprint):
    return jax.tree.map(lambda x: 4 * x, blueprint.init(jax.random.key(0)))


def sampler(blueprint, slots, temperature=TEMPERATURE):
    options = {"slots": slots, "longest": 5, "max_tokens": MOST, "temperature": temperature}
    return RolloutSampler(blueprint, TOKENIZER, **options)


@pytest.fixture(scope="module")
def keys():
    return row_keys(root_key(0), 3, 3, 2)


@pytest.fixture(scope="module")
def drawn(blueprint, params, keys):
    return sampler(blueprint, 6).draw(params, PROMPTS, keys)


def test_a_sample_does_not_depend_on_slots_and_neighbors(blueprint, params, keys, drawn):
    fewer = sampler(blueprint, 4)
    for one, other in zip(fewer.draw(params, PROMPTS, keys), drawn, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.log_p, other.log_p, atol=1e-5)
    order = np.array([4, 2, 5, 0, 3, 1])
    shuffled = fewer.draw(params, [PROMPTS[n] for n in order], keys[order])
    for place, one in zip(order, shuffled, strict=True):
        np.testing.assert_array_equal(one.ids, drawn[place].ids)


def test_samples_of_a_prompt_and_of_rollouts_have_keys_of_their_own():
    numbers = [jax.random.key_data(row_keys(root_key(0), n, 3, 2)) for n in range(2)]
    other = jax.random.key_data(row_keys(root_key(1), 0, 3, 2))
    assert len(np.unique(np.concatenate([*numbers, other]), axis=0)) == 18
    # Those of a prompt do not change with the number of samples or prompts.
    more = jax.random.key_data(row_keys(root_key(0), 0, 4, 3)).reshape(4, 3, -1)
    np.testing.assert_array_equal(more[:3, :2].reshape(6, -1), numbers[0])


def test_log_probabilities_are_those_that_the_objective_divides_by(blueprint, params, drawn):
    """The ratio of the first update is 1, at any temperature, over the ids that are drawn."""
    samples = [Weighted(*each, 1.0) for each in zip(PROMPTS, drawn, strict=True)]
    rows = as_rows(samples, 12, mean="token")
    made = build(Policy(), LossConfig())
    allowed = allowed_ids(TOKENIZER, VOCAB)
    objective = PolicyLearning(made.settings, LossConfig(), "decoder", TEMPERATURE, allowed)
    metrics = jax.jit(lambda p, x: objective.loss(blueprint.merge(p), x, None).metrics)(
        params, rows
    )
    assert float(metrics["sampler_gap_nats"].value) < 1e-5
    assert float(metrics["sampler_gap_high_nats"].value) < 1e-4
    ids = np.concatenate([each.ids for each in drawn])
    assert allowed[ids].all()
    assert not allowed[TOKENIZER.size :].any()


def test_a_sample_ends_with_the_end_token_or_at_the_limit(drawn):
    for each in drawn:
        ended = np.isin(each.ids, TOKENIZER.ends)
        assert (each.reason == "eos_token") == bool(ended[-1])
        assert not ended[:-1].any()
        assert each.reason == "eos_token" or len(each.ids) == MOST


def test_a_prompt_that_leaves_no_positions_is_refused(blueprint):
    from jaxlm.models.families.gpt2 import GPT2

    small = Blueprint(
        GPT2(vocab=VOCAB, width=16, depth=1, heads=2, max_positions=8).build(), Precision.float32()
    )
    with pytest.raises(ConfigError, match="exceed the positions"):
        sampler(small, 2)


@pytest.mark.parametrize("mean", ["sequence", "token", "constant", "sum"])
def test_weights_and_counts_make_the_mean(mean):
    """Two samples have 2 and 4 tokens; a third one is left out."""
    losses, sizes = np.array([3.0, 1.0, 99.0]), (2, 4, 3)
    samples = [
        Weighted(np.arange(3), Drawn(np.full(n, 7), np.full(n, -1.0), "length"), a)
        for n, a in zip(sizes, (0.5, -0.5, None), strict=True)
    ]
    rows = as_rows(samples, 8, mean=mean, max_tokens=16)
    expected = {
        "sequence": (3 + 1) / 2,
        "token": (2 * 3 + 4 * 1) / 6,
        "constant": (2 * 3 + 4 * 1) / 16 / 2,
        "sum": (2 * 3 + 4 * 1) / 2,
    }
    total = (rows.weights * losses[:, None]).sum() / rows.rollout.counts.sum()
    assert total == pytest.approx(expected[mean])
    assert (rows.targets[rows.weights > 0] == 7).all()
    assert rows.tokens[0, :5].tolist() == [0, 1, 2, 7, 0]  # the last id is a target alone
    assert rows.rollout.advantages[1].tolist() == [0, 0, -0.5, -0.5, -0.5, -0.5, 0, 0]
