"""Searched integers of four bits against float64 solutions and rounding to nearest."""

import numpy as np
import pytest

from jaxlm.ops import int4
from jaxlm.ops.weight_codes import WeightFormat

SYMMETRIC, ZERO = WeightFormat("int4", 16), WeightFormat("int4_zero", 16)


def problem(inputs=64, outs=24, rows=400, seed=0):
    """A weight, and the Gram matrix and magnitudes of correlated inputs with strong channels."""
    draw = np.random.default_rng(seed)
    weight = draw.normal(size=(inputs, outs)).astype(np.float32)
    x = draw.normal(size=(rows, inputs)) @ (np.eye(inputs) + 0.3 * draw.normal(size=(inputs,) * 2))
    x[:, :: inputs // 4] *= 20
    return weight, x.T @ x, np.abs(x).mean(0)


def dense_gptq(weight, gram, grid, damping=0.01):
    """Round input after input; after each, solve for the best values of the others in float64."""
    damped = gram + np.eye(len(gram)) * damping * np.diag(gram).mean()
    left, codes = weight.astype(np.float64), np.zeros(weight.shape, np.float32)
    rest = list(np.argsort(-np.diag(gram), kind="stable"))
    while rest:
        first = rest[0]
        row = grid.rows(int(first), 16)
        codes[first] = row.codes(left[first])
        inverse = np.linalg.inv(damped[np.ix_(rest, rest)])
        wrong = left[first] - row.values(codes[first])
        left[rest] -= np.outer(inverse[:, 0] / inverse[0, 0], wrong)
        rest = rest[1:]
    return codes


@pytest.mark.few(1)
@pytest.mark.parametrize("form", [SYMMETRIC, ZERO], ids=lambda form: form.base)
def test_gptq_has_the_codes_of_a_dense_solution_in_float64(form):
    weight, gram, _ = problem()
    made = int4.gptq(weight, gram, form)
    expected = dense_gptq(weight, gram, int4.searched(weight, gram, form))
    plain = int4.nearest(weight, int4.fitted(weight, form), form)
    errors = [int4.error(each, weight, gram) for each in (made, plain)]
    wrong = made.values - weight
    np.testing.assert_allclose(errors[0], np.einsum("io,ij,jo->o", wrong, gram, wrong))
    is_ours = errors[0] < errors[1]
    assert is_ours.mean() > 0.9
    np.testing.assert_array_equal(made.codes[:, is_ours], expected[:, is_ours])
    assert errors[0].sum() < 0.4 * errors[1].sum()


def test_errors_reach_inputs_that_are_rounded_in_a_later_product(monkeypatch):
    weight, gram, _ = problem()
    whole = int4.gptq(weight, gram, SYMMETRIC)
    monkeypatch.setattr(int4, "COLUMNS", 24)
    np.testing.assert_array_equal(int4.gptq(weight, gram, SYMMETRIC).codes, whole.codes)


@pytest.mark.few(1)
@pytest.mark.parametrize("form", [SYMMETRIC, ZERO], ids=lambda form: form.base)
def test_the_searched_scale_of_a_block_is_that_of_the_least_error(form):
    weight, gram, _ = problem(inputs=40, outs=8)
    grid = int4.searched(weight, gram, form)
    for first in (0, 16, 32):
        rows = slice(first, first + 16)
        part, inputs = weight[rows].astype(np.float64), gram[rows, rows]
        tried = [int4.fitted(weight[rows], form, ratio) for ratio in int4.RATIOS]
        wrong = [int4.nearest(part, each, form).values - part for each in tried]
        errors = np.array([np.einsum("io,ij,jo->o", each, inputs, each) for each in wrong])
        scales = np.array([each.scales[0] for each in tried])
        expected = scales[errors.argmin(0), np.arange(8)]
        np.testing.assert_array_equal(grid.scales[first // 16], expected)
        assert (expected < scales[0]).any()


@pytest.mark.parametrize("form", [SYMMETRIC, ZERO, WeightFormat("int4", "all")], ids=str)
def test_leaves_are_those_of_the_stored_form(form):
    weight = problem(inputs=67)[0]
    leaves = int4.nearest(weight, int4.fitted(weight, form), form).leaves(form)
    expected = form.quantize(weight)
    assert leaves.keys() == expected.keys()
    for name, leaf in leaves.items():
        np.testing.assert_allclose(leaf, expected[name], rtol=0 if name == "codes" else 2e-7)
        assert leaf.dtype == expected[name].dtype


def test_inputs_of_equal_size_and_no_correlation_are_rounded_to_nearest():
    weight = problem()[0]
    made = int4.gptq(weight, np.eye(64), SYMMETRIC)
    grid = int4.searched(weight, np.eye(64), SYMMETRIC)
    np.testing.assert_array_equal(made.codes, int4.nearest(weight, grid, SYMMETRIC).codes)


def test_factors_by_magnitude_and_scales_by_ratio_lose_less():
    weight, gram, magnitudes = problem()
    factors = int4.awq_scales([weight[:, :9], weight[:, 9:]], gram, magnitudes, SYMMETRIC)
    assert factors[::16].min() > factors[1::16].max()
    scaled, adjusted = weight * factors[:, None], gram / np.outer(factors, factors)
    grids = int4.fitted(scaled, SYMMETRIC), int4.searched(scaled, adjusted, SYMMETRIC)
    errors = [
        int4.error(int4.nearest(scaled, grid, SYMMETRIC), scaled, adjusted).sum() for grid in grids
    ]
    plain = int4.nearest(weight, int4.fitted(weight, SYMMETRIC), SYMMETRIC)
    assert errors[1] <= errors[0] < 0.7 * int4.error(plain, weight, gram).sum()


@pytest.mark.few(3)
@pytest.mark.parametrize("form", [SYMMETRIC, ZERO], ids=lambda form: form.base)
@pytest.mark.parametrize(
    "case",
    [
        "constant",
        "zero",
        "outlier",
        "singular",
        "indefinite",
        "unseen",
        "no input",
        "short block",
        "weakly correlated",
    ],
)
def test_bad_weights_and_inputs_never_lose_more_than_rounding_to_nearest(case, form):
    weight, gram, magnitudes = problem(inputs=67 if case == "short block" else 64)
    if case in ("constant", "zero"):
        weight[:, 3] = weight[5] = 2.5 if case == "constant" else 0
    if case == "outlier":
        weight[7, 2], gram = 1e4, gram * 1e6
    if case == "singular":  # fewer rows than inputs, two of them equal
        x = np.random.default_rng(1).normal(size=(8, 64)).astype(np.float32)
        x[:, 1] = x[:, 0]
        gram = x.T @ x
    if case == "indefinite":  # by the rounding of its products
        x = np.random.default_rng(1).normal(size=(40, 64))
        noise = np.random.default_rng(2).normal(size=(64, 64))
        gram = x.T @ x + 0.15 * (noise + noise.T)
        assert np.linalg.eigvalsh(gram).min() < -0.02 * np.diag(gram).mean()
    if case == "weakly correlated":  # the searched codes of some outputs have a larger error
        draw = np.random.default_rng(3)
        weight = draw.normal(size=(32, 64)).astype(np.float32)
        x = draw.normal(size=(4000, 32))
        x += 0.1 * x @ draw.normal(size=(32, 32))
        gram, magnitudes = x.T @ x, np.abs(x).mean(0)
    if case == "unseen":
        gram[:, 20], gram[20], magnitudes[20] = 0, 0, 0
    if case == "no input":
        gram, magnitudes = np.zeros_like(gram), np.zeros_like(magnitudes)
    plain = int4.nearest(weight, int4.fitted(weight, form), form)
    made = int4.gptq(weight, gram, form)
    factors = int4.awq_scales([weight], gram, magnitudes, form)
    assert np.isfinite(made.values).all()
    assert np.isfinite(factors).all()
    assert (factors > 0).all()
    least = int4.error(plain, weight, gram)
    assert (int4.error(made, weight, gram) <= least * (1 + 1e-6)).all()
    is_plain = (made.codes == plain.codes).all(0) & (made.grid.scales == plain.grid.scales).all(0)
    assert is_plain.any() or case != "weakly correlated"
    if case == "no input":
        np.testing.assert_array_equal(made.codes, plain.codes)
        np.testing.assert_array_equal(factors, 1)
