import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.generate import sampling

LOGITS = np.log(np.array([[0.5, 0.2, 0.15, 0.1, 0.05], [0.05, 0.1, 0.15, 0.2, 0.5]], np.float32))


def keys(seed, rows):
    return jax.random.split(jax.random.key(seed), rows)


def kept(**options):
    return np.isfinite(np.asarray(sampling.filter_logits(jnp.asarray(LOGITS), **options))).tolist()


def test_top_k_keeps_the_k_likeliest():
    assert kept(top_k=2) == [[True, True, False, False, False], [False, False, False, True, True]]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("p", "count"), [(0.4, 1), (0.5, 1), (0.6, 2), (0.84, 3), (0.99, 5), (1.0, 5)]
)
def test_top_p_keeps_the_fewest_that_reach_p(p, count):
    assert [sum(row) for row in kept(top_p=p)] == [count, count]


def test_top_p_counts_what_top_k_left():
    # Of the two likeliest, normalized again, the first has 5/7.
    assert [sum(row) for row in kept(top_k=2, top_p=0.7)] == [1, 1]


@pytest.mark.few(3)
@pytest.mark.parametrize(("k", "count"), [(1, 2), (2, 2), (3, 5), (4, 5), (5, 5), (6, 6), (9, 6)])
def test_top_k_keeps_all_that_equal_the_last_of_the_k(k, count):
    tied = jnp.asarray([[1.0, 3.0, 2.0, 2.0, 3.0, 2.0]])
    assert int(jnp.isfinite(sampling.filter_logits(tied, top_k=k)).sum()) == count


@pytest.mark.few(2)
@pytest.mark.parametrize("p", [1e-9, 0.3, 0.5, 0.75, 0.999999])
def test_top_p_keeps_all_or_none_of_those_that_are_equally_likely(p):
    tied = jnp.log(jnp.asarray([[0.2, 0.3, 0.2, 0.3]]))
    is_kept = jnp.isfinite(sampling.filter_logits(tied, top_p=p))[0].tolist()
    assert is_kept == [p > 0.6, True, p > 0.6, True]


@pytest.mark.parametrize("p", [1e-30, 0.5, 1 - 1e-7])
def test_top_p_keeps_the_likeliest_where_it_has_all_the_probability(p):
    sure = jnp.asarray([[-jnp.inf, 200.0, 0.0, -jnp.inf]])
    cut = sampling.filter_logits(sure, top_p=p)
    assert jnp.isfinite(cut)[0].tolist() == [False, True, False, False]


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.999}, {"top_k": 4, "top_p": 0.9}])
def test_an_id_that_was_excluded_before_stays_out(options):
    allowed = jnp.where(jnp.arange(5) % 2 == 0, LOGITS, sampling.EXCLUDED)
    drawn = sampling.draw(
        jnp.repeat(allowed, 500, axis=0), keys(0, 1000), temperature=3.0, **options
    )
    assert set(drawn.tolist()) == {0, 2, 4}


@pytest.mark.few(3)
@pytest.mark.parametrize("share", [1e-6, 0.1, 0.2, 0.39, 0.41, 0.9, 1.0])
def test_min_p_keeps_what_is_at_least_that_share_as_likely_as_the_likeliest(share):
    probability = np.exp(LOGITS.astype(np.float64))
    expected = probability >= share * probability.max(axis=-1, keepdims=True) * (1 - 1e-6)
    assert kept(min_p=share) == expected.tolist()


def test_a_row_draws_the_same_whatever_is_beside_it():
    logits = jax.random.normal(jax.random.key(1), (6, 50))
    together = sampling.draw(logits, keys(7, 6), temperature=1.0)
    alone = [
        sampling.draw(logits[i : i + 1], keys(7, 6)[i : i + 1], temperature=1.0)[0]
        for i in range(6)
    ]
    assert together.tolist() == [int(i) for i in alone]


@pytest.mark.few(4)
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.3}])
@pytest.mark.parametrize("temperature", [0.01, 1e-30, 1e-38, 1e-45])
def test_a_temperature_near_zero_draws_the_likeliest(temperature, options):
    logits = 40 + 100 * jnp.asarray(LOGITS)
    for seed in range(3):
        drawn = sampling.draw(logits, keys(seed, 2), temperature=temperature, **options)
        assert drawn.tolist() == [0, 4]


def test_temperature_zero_takes_the_likeliest_whatever_the_key():
    for seed in range(3):
        drawn = sampling.draw(jnp.asarray(LOGITS), keys(seed, 2), temperature=0.0)
        assert drawn.tolist() == [0, 4]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_tempered_distribution(temperature):
    many = jnp.broadcast_to(jnp.asarray(LOGITS[:1]), (20_000, 5))
    drawn = sampling.draw(many, keys(0, 20_000), temperature=temperature)
    share = np.bincount(np.asarray(drawn), minlength=5) / 20_000
    expected = np.exp(LOGITS[0] / temperature)
    np.testing.assert_allclose(share, expected / expected.sum(), atol=0.012)
