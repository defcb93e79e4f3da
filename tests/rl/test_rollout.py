"""Samples are functions of prompt and key; rows and weights make the mean that is asked for."""

import jax
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.precision import Precision
from jaxlm.data.tokenizer import Bytes, Characters
from jaxlm.generate import decode
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.objectives.build import build
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.policy import PolicyLearning
from jaxlm.objectives.policy_config import Policy
from jaxlm.rl.rollout import (
    DrawnSample,
    RolloutSampler,
    RolloutSizes,
    Weighted,
    allowed_ids,
    as_rows,
    empty_last,
    root_key,
    row_keys,
)
from tests.models.parameters import draw_params

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
    return draw_params(blueprint, std=0.08)


def sampler(blueprint, slots, temperature=TEMPERATURE):
    return RolloutSampler(blueprint, TOKENIZER, RolloutSizes(slots, 5, MOST), temperature)


@pytest.fixture(scope="module")
def keys():
    return row_keys(root_key(0), 3, 3, 2)


@pytest.fixture(scope="module")
def drawn(blueprint, params, keys):
    return sampler(blueprint, 6).draw(params, PROMPTS, keys)


@pytest.mark.slow
def test_a_sample_does_not_depend_on_slots_and_neighbors(blueprint, params, keys, drawn):
    fewer = sampler(blueprint, 4)
    for one, other in zip(fewer.draw(params, PROMPTS, keys), drawn, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.log_p, other.log_p, atol=1e-5)
    order = np.array([4, 2, 5, 0, 3, 1])
    shuffled = fewer.draw(params, [PROMPTS[n] for n in order], keys[order])
    for place, one in zip(order, shuffled, strict=True):
        np.testing.assert_array_equal(one.ids, drawn[place].ids)


def test_a_prompt_is_read_once_for_its_samples(blueprint, params, monkeypatch):
    """Also in slots that are filled again; the samples are those of a prompt for each row."""
    prompts, keys = [each for each in PROMPTS for _ in range(4)], row_keys(root_key(3), 0, 6, 4)
    sizes = RolloutSizes(8, 5, MOST)
    alone = RolloutSampler(blueprint, TOKENIZER, sizes, 1.0).draw(params, prompts, keys)
    rows, prefill = [], decode.prefill
    monkeypatch.setattr(
        decode, "prefill", lambda *args, **more: rows.append(len(args[1])) or prefill(*args, **more)
    )
    shared = RolloutSampler(blueprint, TOKENIZER, sizes._replace(samples=4), 1.0)
    for one, other in zip(shared.draw(params, prompts, keys), alone, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.log_p, other.log_p, atol=1e-5)
    assert set(rows) == {3, 2}  # of 8 slots, and of the 2 that are filled again


@pytest.fixture(scope="module")
def wide(blueprint, params):
    """A sampler of 8 slots whose samples end by chance, with a ninth of it at each token."""
    few = Characters("abcdefgh")
    flat = jax.tree.map(lambda x: x / 16, params)
    return RolloutSampler(blueprint, few, RolloutSizes(8, 12, 64), 1.0), flat


def test_free_slots_are_filled_again(wide):
    """Samples of geometric lengths need less than half of the passes of one batch after another."""
    drawing, flat = wide
    prompts, keys = [PROMPTS[0]] * 48, row_keys(root_key(1), 0, 48, 1)
    order: list[int] = []
    drawn = drawing.draw(flat, prompts, keys, deliver=lambda n, sample: order.append(n))
    lengths = [len(each.ids) for each in drawn]
    batches = sum(max(lengths[first : first + 8]) - 1 for first in range(0, 48, 8))
    assert sorted(order) == list(range(48))
    assert order != sorted(order)
    assert drawing.passes * 2 < batches
    alone = drawing.draw(flat, prompts[40:], keys[40:])
    for one, other in zip(alone, drawn[40:], strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.log_p, other.log_p, atol=1e-5)


def test_a_further_turn_continues_the_ids_that_were_drawn(wide):
    """A turn is drawn as after a prompt of all ids before it, with a key of its own."""
    drawing, flat = wide
    prompts, keys = [PROMPTS[0]] * 12, row_keys(root_key(2), 0, 12, 1)
    more = np.array([4, 5, 6], np.int32)

    def follow(ended):
        short = [len(each.ids) <= 4 and each.is_drawn is None for _, each in ended]
        return [more if each else None for each in short]

    single = drawing.draw(flat, prompts, keys)
    drawn = drawing.draw(flat, prompts, keys, follow=follow)
    followed = [n for n, each in enumerate(drawn) if each.is_drawn is not None]
    assert 0 < len(followed) < 12
    for n, (one, whole) in enumerate(zip(single, drawn, strict=True)):
        size = len(one.ids)
        np.testing.assert_array_equal(whole.ids[:size], one.ids)
        if n not in followed:
            assert len(whole.ids) == size
            continue
        np.testing.assert_array_equal(whole.ids[size : size + 3], more)
        assert whole.mask.tolist() == [True] * size + [False] * 3 + [True] * len(whole.last_turn)
        assert not whole.log_p[size : size + 3].any()
        key = jax.random.fold_in(keys[n], 1)[None]
        prompt = np.concatenate((prompts[n], one.ids, more))
        (repeated,) = drawing.draw(flat, [prompt], key)
        np.testing.assert_array_equal(repeated.ids, whole.last_turn)
    rows = as_rows([Weighted(PROMPTS[0], drawn[n], 1.0) for n in followed], 80, mean="token")
    for row, n in enumerate(followed):
        weights = rows.weights[row, 1 : 1 + len(drawn[n].ids)]
        np.testing.assert_array_equal(weights > 0, drawn[n].mask)
        assert rows.rollout.counts[row].sum() == drawn[n].mask.sum()


def test_samples_of_a_prompt_and_of_rollouts_have_keys_of_their_own():
    numbers = [jax.random.key_data(row_keys(root_key(0), n, 3, 2)) for n in range(2)]
    other = jax.random.key_data(row_keys(root_key(1), 0, 3, 2))
    assert len(np.unique(np.concatenate([*numbers, other]), axis=0)) == 18
    # Those of a prompt do not change with the number of samples or prompts.
    more = jax.random.key_data(row_keys(root_key(0), 0, 4, 3)).reshape(4, 3, -1)
    np.testing.assert_array_equal(more[:3, :2].reshape(6, -1), numbers[0])
    last = root_key(0)
    for place in (1, 2, 1):  # rollout, prompt and sample
        last = jax.random.fold_in(last, place)
    np.testing.assert_array_equal(jax.random.key_data(last), numbers[1][-1])


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
    """Samples have 2 and 4 tokens, and two with a tool's text of 3 between; one is left out."""
    losses, sizes = np.array([3.0, 1.0, 5.0, 99.0]), (2, 4, 2, 3)
    samples = [
        Weighted(np.arange(3), DrawnSample(np.full(n, 7), np.full(n, -1.0), "length"), a)
        for n, a in zip(sizes, (0.5, -0.5, 0.25, None), strict=True)
    ]
    turn = DrawnSample(np.full(1, 7), np.full(1, -1.0), "eos_token")
    samples[2] = samples[2]._replace(drawn=turn.followed(np.full(3, 8)).then(turn))
    rows = as_rows(samples, 10, mean=mean, max_tokens=16)
    expected = {
        "sequence": (3 + 1 + 5) / 3,
        "token": (2 * 3 + 4 * 1 + 2 * 5) / 8,
        "constant": (2 * 3 + 4 * 1 + 2 * 5) / 16 / 3,
        "sum": (2 * 3 + 4 * 1 + 2 * 5) / 3,
    }
    total = (rows.weights * losses[:, None]).sum() / rows.rollout.counts.sum()
    assert total == pytest.approx(expected[mean])
    assert (rows.targets[rows.weights > 0] == 7).all()
    assert rows.tokens[0, :5].tolist() == [0, 1, 2, 7, 0]  # the last id is a target alone
    assert rows.rollout.advantages[1].tolist() == [0, 0, *[-0.5] * 4, 0, 0, 0, 0]
    assert rows.rollout.advantages[2].tolist() == [0, 0, 0.25, 0, 0, 0, 0.25, 0, 0, 0]


@pytest.mark.parametrize("devices", [1, 2])
def test_samples_without_an_advantage_are_in_the_last_micro_batches(devices):
    """Twelve rows are in three micro-batches, and each device has a part of every one."""
    used = {0, 3, 5, 7, 10}
    samples = [
        Weighted(np.array([n]), DrawnSample(np.zeros(0), np.zeros(0), "length"), advantage)
        for n, advantage in ((n, 1.0 if n in used else None) for n in range(12))
    ]
    assert [int(each.prompt[0]) for each in empty_last(samples, 1)] == list(range(12))
    placed = empty_last(samples, 3)
    assert sorted(int(each.prompt[0]) for each in placed) == list(range(12))
    is_used = np.array([each.advantage is not None for each in placed])
    parts = is_used.reshape(devices, -1, 3)  # as `split_microbatches` splits the rows of a device
    assert parts.sum((0, 1)).tolist() == [4, 1, 0]
