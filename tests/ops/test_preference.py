import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.ops import preference

RNG = np.random.default_rng(0)
GAPS = np.array([0.0, *RNG.normal(size=30) * 8, 300.0, -300.0])
DESIRABLE = np.arange(len(GAPS)) % 2 == 0


def softplus(x):
    return np.logaddexp(0.0, x)  # -log sig(-x)


def complement(log_p):
    return np.log(-np.expm1(log_p))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda x: preference.dpo(x, beta=0.3), softplus(-0.3 * GAPS)),
        (
            lambda x: preference.dpo(x, beta=0.3, smoothing=0.2),
            0.8 * softplus(-0.3 * GAPS) + 0.2 * softplus(0.3 * GAPS),
        ),
        (
            lambda x: preference.dpo(x, beta=0.3, smoothing=0.2, noise="robust"),
            (0.8 * softplus(-0.3 * GAPS) - 0.2 * softplus(0.3 * GAPS)) / 0.6,
        ),
        (lambda x: preference.ipo(x, beta=0.25), (GAPS - 2) ** 2),
        (lambda x: preference.hinge(x, beta=0.5), np.maximum(0, 1 - 0.5 * GAPS)),
        (lambda x: preference.simpo(x, beta=2.0, gamma=1.5), softplus(1.5 - 2 * GAPS)),
        (
            lambda x: preference.kto(x, DESIRABLE, beta=0.5, anchor=0.25),
            np.where(
                DESIRABLE,
                1 / (1 + np.exp(np.minimum(0.5 * (GAPS - 0.25), 700))),
                1 / (1 + np.exp(np.minimum(-0.5 * (GAPS - 0.25), 700))),
            ),
        ),
        (lambda x: preference.reward(x, 0 * x, margin=0.5), softplus(0.5 - GAPS)),
        (
            lambda x: preference.reward(x, x + 1, center=0.1),
            softplus(1.0) + 0.1 * (2 * GAPS + 1) ** 2,
        ),
    ],
)
def test_each_loss_is_that_of_float64_with_its_gradient(loss, expected):
    gaps = GAPS.astype(np.float32)
    np.testing.assert_allclose(loss(gaps), expected, rtol=3e-5, atol=2e-6)
    with jax.enable_x64(True):
        step = 1e-5
        slope = (loss(GAPS + step) - loss(GAPS - step)) / (2 * step)
    gradient = jax.grad(lambda x: loss(x).sum())(jnp.asarray(gaps))
    smooth = np.abs(GAPS - 2) > 1e-3  # the corner of the hinge
    np.testing.assert_allclose(gradient[smooth], np.asarray(slope)[smooth], rtol=1e-4, atol=1e-5)


def test_odds_ratios_are_those_of_float64_also_near_certainty():
    chosen = np.array([-1e-5, -0.01, -0.5, -0.7, -3.0, -40.0])
    rejected = chosen[::-1].copy()
    odds = chosen - rejected - complement(chosen) + complement(rejected)
    loss = preference.orpo(*(jnp.asarray(x, jnp.float32) for x in (chosen, rejected)), beta=0.5)
    np.testing.assert_allclose(loss, 0.5 * softplus(-odds), rtol=1e-3, atol=1e-6)
    sure = jnp.zeros(1)
    value, gradient = jax.value_and_grad(lambda x: preference.orpo(x, sure - 1, beta=1.0).sum())(
        sure
    )
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_flipped_labels_mirror_the_loss_and_robust_labels_undo_their_noise():
    gaps = jnp.asarray(GAPS, jnp.float32)
    flipped = preference.dpo(-gaps, beta=0.3, smoothing=0.2)
    np.testing.assert_allclose(preference.dpo(gaps, beta=0.3, smoothing=0.8), flipped, rtol=1e-6)
    right, wrong = (
        preference.dpo(sign * gaps, beta=0.3, smoothing=0.2, noise="robust") for sign in (1, -1)
    )
    clean = preference.dpo(gaps, beta=0.3)
    np.testing.assert_allclose(0.8 * right + 0.2 * wrong, clean, rtol=1e-4, atol=1e-5)
    one = preference.kto(gaps, DESIRABLE, beta=0.3)
    np.testing.assert_allclose(preference.kto(-gaps, ~DESIRABLE, beta=0.3), one, rtol=1e-6)
