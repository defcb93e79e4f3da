"""Seeded faults of GPTQ, AWQ and rounding: each is caught by a named test."""

import inspect

import jax
import pytest

from jaxlm.ops import int4, quantize, weight_codes
from jaxlm.ops.weight_codes import WeightFormat
from jaxlm.recipes.use import calibrate
from jaxlm.recipes.use.calibrate import Calibration
from jaxlm.recipes.use.layer_runner import LayerRunner
from jaxlm.tune import folding
from tests.models.parameters import draw_params
from tests.mutation import mutate
from tests.ops import test_int4, test_weight_codes
from tests.recipes.use import test_calibrate
from tests.tune import test_folding

SYMMETRIC, ZERO = test_int4.SYMMETRIC, test_int4.ZERO


def dense():
    test_int4.test_gptq_has_the_codes_of_a_dense_solution_in_float64(SYMMETRIC)


def products():
    with pytest.MonkeyPatch.context() as patch:
        test_int4.test_errors_reach_inputs_that_are_rounded_in_a_later_product(patch)


def bad(*cases, form=SYMMETRIC):
    def check():
        for case in cases:
            test_int4.test_bad_weights_and_inputs_never_lose_more_than_rounding_to_nearest(
                case, form
            )

    return check


def scale():
    test_int4.test_the_searched_scale_of_a_block_is_that_of_the_least_error(SYMMETRIC)


def leaves():
    for form in (SYMMETRIC, ZERO):
        test_int4.test_leaves_are_those_of_the_stored_form(form)


def magnitudes():
    test_int4.test_factors_by_magnitude_and_scales_by_ratio_lose_less()


def factors():
    params = draw_params(test_calibrate.BLUEPRINT, std=0.1)
    test_calibrate.test_factors_are_searched_for_all_readers_and_their_codes_for_scaled_inputs(
        params
    )


def sums(folder, patch):
    params = draw_params(test_calibrate.BLUEPRINT, std=0.1)
    test_calibrate.test_sums_are_those_of_a_float64_model_behind_rounded_layers(
        params, folder, patch
    )


def experts(folder):
    test_calibrate.test_experts_are_searched_and_those_that_no_token_chose_are_rounded_to_nearest(
        "gptq", folder
    )


def folded():
    test_folding.test_a_folded_block_computes_the_same("qwen2")


def reference(base):
    shape = test_weight_codes.SHAPES["even"]
    return lambda: test_weight_codes.test_a_weight_is_that_of_the_reference(base, shape)


def span():
    for offset in (0.0, 3.0, -3.0):
        test_weight_codes.test_sixteen_codes_span_a_block_and_have_0(offset, 64)


def constants():
    test_weight_codes.test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden("int4")


# Name: the object, its function, the text that changes, the text of the fault, and the check.
SEARCH = {
    "GPTQ without the errors of earlier inputs": (
        *(int4, "gptq", "left[n:end] -= factor[n, n:end, None] * errors[n - begin]", "pass"),
        dense,
    ),
    "GPTQ without the errors of earlier products": (
        *(int4, "gptq", "left[end:] -= factor[begin:end, end:].T @ errors", "pass"),
        products,
    ),
    "GPTQ adds errors": (int4, "gptq", "left[n:end] -=", "left[n:end] +=", dense),
    "GPTQ in the order of the weight": (
        *(int4, "gptq", 'np.argsort(-diagonal, kind="stable")', "np.arange(len(diagonal))"),
        dense,
    ),
    "GPTQ begins with the least input": (int4, "gptq", "argsort(-diag", "argsort(diag", dense),
    "GPTQ has scales of other inputs": (int4, "gptq", "int(order[n])", "n", dense),
    "GPTQ leaves codes in its order": (
        *(int4, "gptq", "made.codes[order] = codes", "made.codes[:] = codes"),
        dense,
    ),
    "GPTQ of the Gram matrix in place of its inverse": (
        *(int4, "_inverse_factor", "linalg.solve_triangular(lower[::-1, ::-1], identity, "
          "lower=False)", "linalg.cholesky(damped)"),
        dense,
    ),
    "GPTQ without damping": (int4, "_inverse_factor", "damping * mean, mean", "0, mean", dense),
    "GPTQ damps by the sum": (int4, "_inverse_factor", "used.mean()", "used.sum()", dense),
    "GPTQ keeps what is worse than rounding to nearest": (
        *(int4, "gptq", "<= error(plain, weight, gram)", "<= np.inf"),
        bad("weakly correlated"),
    ),
    "an error without correlations": (int4, "error", "gram @ wrong", "np.diag(gram)[:, None] * "
      "wrong", dense),
    "a scale of the largest error": (int4, "searched", "error < least[n]", "error > least[n]",
      scale),
    "a scale for inputs of one size": (
        *(int4, "searched", "(gram[rows, rows] @ wrong[rows])", "wrong[rows]"),
        scale,
    ),
    "a scale for the inputs of the first block": (
        *(int4, "searched", "gram[rows, rows]", "gram[:len(wrong[rows]), :len(wrong[rows])]"),
        scale,
    ),
    "a scale for the whole of a ratio": (int4, "fitted", "np.float32(ratio)", "np.float32(1)",
      scale),
    "seven steps are eight": (int4, "fitted", "np.float32(7)", "np.float32(8)", leaves),
    "fifteen steps are sixteen": (int4, "fitted", "np.float32(15)", "np.float32(16)", leaves),
    "the second code is first": (int4.Codes, "leaves", "pairs[:, 0] | (pairs[:, 1] << 4)",
      "pairs[:, 1] | (pairs[:, 0] << 4)", leaves),
    "AWQ has the power of 0": (int4, "awq_scales", "known**power", "known**0", magnitudes),
    "AWQ divides by the power": (int4, "awq_scales", "known**power", "known**-power", magnitudes),
    "AWQ scales the weight only": (
        *(int4, "awq_scales", ".values / tried[:, None]", ".values"),
        magnitudes,
    ),
    "AWQ keeps the worst": (int4, "awq_scales", "total < least", "total > least or least == np.inf",
      magnitudes),
    "AWQ ignores the size of inputs": (int4, "awq_scales", "(gram @ wrong)", "wrong", magnitudes),
    "AWQ divides by 0": (int4, "awq_scales", "np.maximum(magnitudes, floor)", "magnitudes",
      bad("unseen")),
}  # fmt: skip
COMPILED = {
    "AWQ searches for one of the readers": (
        *(calibrate, "_fold", "for name in rounded]", "for name in rounded[:1]]"),
        factors,
    ),
    "AWQ searches codes for the inputs before": (
        *(calibrate, "_fold", "grams[name] / np.outer(factors, factors)", "grams[name]"),
        factors,
    ),
    "AWQ has other factors in the source": (
        *(calibrate, "_fold", "apply(fold, jnp.asarray(factors)", "apply(fold, jnp.asarray(factors "
          "* 1.1)"),
        factors,
    ),
    "AWQ has the sizes of one query head": (
        *(calibrate, "_fold", "heads.mean(1, keepdims=True)", "heads[:, :1]"),
        factors,
    ),
    "padding is read": (
        *(LayerRunner, "_through", "jnp.where((batch.segments > 0)[..., None], rows, 0.0)", "rows"),
        sums,
    ),
    "the last batch alone is read": (
        *(Calibration, "_sums", "jax.tree.map(jnp.add, sums, added) if sums else added", "added"),
        sums,
    ),
    "all layers read the first stream": (
        *(Calibration, "_advance", "stream.write(number, runner.outputs(place, block, "
          "stream.read(number), batch))", "pass"),
        sums,
    ),
    "layers read the weights that are not rounded": (
        *(Calibration, "_advance", "values.astype(layer.weight[...].dtype)", "layer.weight[...]"),
        sums,
    ),
    "all layers are the first": (LayerRunner, "block", "leaf[place.number]", "leaf[0]", sums),
    "readers are divided, too": (
        *(folding, "apply", "factors.reshape(shape))\n    source", "1 / factors.reshape(shape))\n"
          "    source"),
        folded,
    ),
    "the source is not divided": (
        *(folding, "apply", "+ offset) / factors.reshape(shape)", "+ offset)"),
        folded,
    ),
    "experts read all tokens": (
        *(calibrate, "solved_experts", "ExpertRange(first, at_once)", "ExpertRange(0, at_once)"),
        experts,
    ),
    "eight bits are cut off": (quantize, "rounded", "jnp.round(low)", "jnp.trunc(low)",
      reference("int8")),
    "four bits are cut off": (WeightFormat, "_in_four_bits", "jnp.round(unit)", "jnp.floor(unit)",
      reference("int4")),
    "a zero that is cut off": (
        *(WeightFormat, "_in_four_bits", "jnp.round(-least", "jnp.floor(-least"),
        span,
    ),
    "0 is no code": (
        *(WeightFormat, "_in_four_bits", "jnp.minimum(jnp.min(blocks, 1), 0.0)", "jnp.min(blocks, "
          "1)"),
        span,
    ),
    "codes from -8": (WeightFormat, "_in_four_bits", "largest / 7, jnp", "largest / 8, jnp",
      reference("int4")),
    "the zero is 7": (WeightFormat, "_in_four_bits", "largest.shape, 8.0", "largest.shape, 7.0",
      constants),
    "the level below": (weight_codes, "_nearest_level", "(low + high) / 2", "low",
      reference("nf4")),
    "a mean that is added twice": (WeightFormat, "quantize", "(largest - mean)", "largest",
      reference("nf4_double")),
    "codes of a byte are swapped": (weight_codes, "_pack", "pairs[:, 0] | (pairs[:, 1] << 4)",
      "pairs[:, 1] | (pairs[:, 0] << 4)", reference("int4")),
    "a scale of the next block": (weight_codes, "_repeated", "jnp.repeat(rows, times, 0)",
      "jnp.roll(jnp.repeat(rows, times, 0), 1, 0)", reference("int8")),
}  # fmt: skip


@pytest.mark.few(len(SEARCH))
@pytest.mark.parametrize("name", SEARCH | COMPILED)
def test_a_seeded_fault_is_caught(name, tmp_path, monkeypatch):
    owner, function, old, new, check = (SEARCH | COMPILED)[name]

    def run(folder):
        folder.mkdir()
        known = {"folder": folder, "patch": monkeypatch}
        check(**{each: known[each] for each in inspect.signature(check).parameters})

    run(tmp_path / "without")
    mutate(monkeypatch, owner, function, old, new)
    if name in COMPILED:
        jax.clear_caches()  # programs without the fault
    with pytest.raises((AssertionError, RuntimeWarning)):
        run(tmp_path / "with")
