import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.generate import sampling

LOGITS = np.log(np.array([[0.5, 0.2, 0.15, 0.1, 0.05], [0.05, 0.1, 0.15, 0.2, 0.5]], np.float32))


def kept(**options):
    return np.isfinite(np.asarray(sampling.filtered(jnp.asarray(LOGITS), **options))).tolist()


def test_top_k_keeps_the_k_likeliest():
    assert kept(top_k=2) == [[True, True, False, False, False], [False, False, False, True, True]]


@pytest.mark.parametrize(
    ("p", "count"), [(0.4, 1), (0.5, 1), (0.6, 2), (0.84, 3), (0.99, 5), (1.0, 5)]
)
def test_top_p_keeps_the_fewest_that_reach_p(p, count):
    assert [sum(row) for row in kept(top_p=p)] == [count, count]


def test_top_p_counts_what_top_k_left():
    # Of the two likeliest, renormalised, the first has 5/7.
    assert [sum(row) for row in kept(top_k=2, top_p=0.7)] == [1, 1]


def test_temperature_zero_takes_the_likeliest_whatever_the_key():
    for seed in range(3):
        drawn = sampling.draw(jnp.asarray(LOGITS), jax.random.key(seed), temperature=0.0)
        assert drawn.tolist() == [0, 4]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_tempered_distribution(temperature):
    many = jnp.broadcast_to(jnp.asarray(LOGITS[:1]), (20_000, 5))
    drawn = sampling.draw(many, jax.random.key(0), temperature=temperature)
    share = np.bincount(np.asarray(drawn), minlength=5) / 20_000
    expected = np.exp(LOGITS[0] / temperature)
    np.testing.assert_allclose(share, expected / expected.sum(), atol=0.012)
