"""The law of loss, its optimum and a fit of its constants, against references in float64."""

import numpy as np
import pytest
from scipy.optimize import minimize, minimize_scalar

from jaxlm.recipes.scaling import loss_law
from jaxlm.recipes.scaling.loss_law import PUBLISHED, Costs, Law, Points, fit, noise, resample

KNOWN = Law(E=1.2, A=300.0, B=900.0, alpha=0.31, beta=0.37)


def runs(scatter, sizes=(1e6, 1e9, 6), tokens=(2e8, 2e10, 5), seed=1):
    """A grid of runs that obey KNOWN, but for log-normal noise."""
    grid = np.meshgrid(np.geomspace(*sizes), np.geomspace(*tokens))
    parameters, seen = (axis.ravel() for axis in grid)
    draw = np.random.default_rng(seed).standard_normal(parameters.size)
    losses = KNOWN.E + KNOWN.A / parameters**KNOWN.alpha + KNOWN.B / seen**KNOWN.beta
    return Points(parameters, seen, losses * np.exp(scatter * draw))


@pytest.mark.parametrize("law", [*PUBLISHED.values(), KNOWN])
@pytest.mark.parametrize("budget", [1e17, 5.76e23])
def test_the_closed_form_is_where_a_numerical_search_ends(law, budget):
    def loss(log_parameters):
        parameters = np.exp(log_parameters)
        return law.E + law.A / parameters**law.alpha + law.B / (budget / 6 / parameters) ** law.beta

    minimum = minimize_scalar(loss, bounds=(0, 60), method="bounded", options={"xatol": 1e-9})
    best = law.optimum(budget)
    assert best.parameters == pytest.approx(np.exp(minimum.x), rel=1e-4)
    assert best.loss_nats == pytest.approx(minimum.fun, rel=1e-12)
    assert 6 * best.parameters * best.tokens == pytest.approx(budget, rel=1e-12)


@pytest.mark.parametrize("law", [*PUBLISHED.values(), KNOWN])
def test_costs_of_six_a_parameter_give_the_closed_form(law):
    sizes = np.array([1e3, 1e7, 1e14])
    best, closed = law.optimum(1e21, Costs(sizes, 6 * sizes)), law.optimum(1e21)
    assert best.parameters == pytest.approx(closed.parameters, rel=5e-3)
    assert best.loss_nats == pytest.approx(closed.loss_nats, rel=1e-6)


def test_a_costlier_size_is_chosen_less():
    sizes = np.geomspace(1e3, 1e14, 40)
    dear = Costs(sizes, 6 * sizes * (1 + 1e4 * (sizes > 1e8)))
    best = KNOWN.optimum(1e22, dear)
    assert KNOWN.optimum(1e22).parameters > 1e9
    assert best.parameters <= 2e8
    assert best.tokens * dear.at(best.parameters) == pytest.approx(1e22)


def test_the_published_constants_give_the_published_answers():
    """Check the optimum for the budget of Gopher and Chinchilla.

    40 billion parameters in table 3 of the one, about 20 tokens a parameter in the other.
    """
    replicated, original = (law.optimum(5.76e23) for law in PUBLISHED.values())
    assert original.parameters == pytest.approx(40e9, rel=0.02)
    assert replicated.parameters == pytest.approx(70e9, rel=0.05)
    assert 15 < replicated.tokens / replicated.parameters < 25


def test_a_fit_finds_the_constants_that_runs_were_made_with():
    fitted = fit(runs(5e-4))
    assert fitted.alpha == pytest.approx(KNOWN.alpha, rel=0.03)
    assert fitted.beta == pytest.approx(KNOWN.beta, rel=0.03)
    assert pytest.approx(KNOWN.E, rel=0.03) == fitted.E
    budget = 1e21
    best, expected = fitted.optimum(budget), KNOWN.optimum(budget)
    assert best.parameters == pytest.approx(expected.parameters, rel=0.1)
    assert best.loss_nats == pytest.approx(expected.loss_nats, rel=0.005)


@pytest.mark.few(1)
@pytest.mark.parametrize("scatter", [5e-4, 3e-3])
def test_no_other_search_finds_a_lower_minimum(scatter):
    """SciPy's L-BFGS, from four starts, on the objective written down again."""
    points = runs(scatter, sizes=(1e5, 4e6, 4), tokens=(1e6, 1e8, 3))
    scale = noise(loss_law._fit(points, 1e-3), points)
    sizes, tokens = np.log(points.parameters), np.log(points.tokens)

    def value(x):
        e, a, b, alpha, beta = x
        output = np.logaddexp(np.logaddexp(e, a - alpha * sizes), b - beta * tokens)
        far = np.abs(output - np.log(points.losses)) / scale
        huber = np.where(far < 1, far**2 / 2, far - 0.5).sum()
        floor = (e - np.log(points.losses.min() / 3)) ** 2 / 2
        return huber + floor + ((alpha - 0.35) ** 2 + (beta - 0.35) ** 2) / (2 * 0.15**2)

    starts = np.array(np.meshgrid([0.1], [5], [5], [0.2, 0.4], [0.2, 0.4])).reshape(5, -1)
    best = min(minimize(value, start, method="L-BFGS-B").fun for start in starts.T)
    law = fit(points)
    ours = value([np.log(law.E), np.log(law.A), np.log(law.B), law.alpha, law.beta])
    assert ours <= best * (1 + 1e-4) + 1e-6
    assert ours == pytest.approx(best, rel=0.01, abs=1e-3), "and it is the same objective"


def test_one_run_that_went_wrong_does_not_move_the_law():
    points = runs(5e-4)
    losses = points.losses.copy()
    losses[7] *= 1.2
    best, expected = fit(points._replace(losses=losses)).optimum(1e21), KNOWN.optimum(1e21)
    assert best.parameters == pytest.approx(expected.parameters, rel=0.1)


@pytest.mark.slow
def test_runs_drawn_again_spread_as_new_runs_would():
    """The interval of 80% contains the truth in about 80% of 30 sets of runs."""
    expected = np.log(KNOWN.optimum(1e20).parameters)
    inside = 0
    for seed in range(30):
        points = runs(2e-3, seed=seed)
        laws = resample(points, fit(points), 40)
        low, high = np.quantile([np.log(law.optimum(1e20).parameters) for law in laws], [0.1, 0.9])
        inside += low <= expected <= high
    assert 18 <= inside <= 29


def test_what_few_runs_do_not_say_stays_near_to_what_is_known():
    """Six runs of one number of tokens do not determine the exponent of tokens."""
    points = runs(5e-4, tokens=(1e9, 1e9, 1))
    law = fit(points)
    assert law.beta == pytest.approx(0.35, abs=0.02)
    for size, tokens, loss in zip(*points, strict=True):
        assert law.loss(size, tokens) == pytest.approx(loss, rel=5e-3)


def test_five_runs_of_three_sizes_suffice():
    points = runs(0.0, sizes=(1e6, 1e8, 3), tokens=(1e8, 1e9, 2))
    assert points.suffice
    assert not Points(*(axis[:4] for axis in points)).suffice
    assert not Points(*(axis[[0, 1, 3, 4, 0]] for axis in points)).suffice, "of two sizes"
