"""Blocks of 256 numbers are as good as llama.cpp's own, and no input makes a bad one."""

import numpy as np
import pytest

from jaxlm.checkpoint import gguf_blocks
from jaxlm.checkpoint.gguf_blocks import BY_NAME, dequantized, quantized
from tests.mutation import mutate

NUMBERS = np.random.default_rng(0).normal(size=(64, 1024)).astype(np.float32)
ALL = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K")
IMPORTANCE = np.exp(np.random.default_rng(1).normal(size=1024)).astype(np.float32)
# The weighted errors of ggml_quantize_chunk of llama.cpp with this importance.
THEIRS = {
    "Q4_0": 0.09616592,
    "Q4_1": 0.079198562,
    "Q5_0": 0.04774391,
    "Q5_1": 0.038375093,
    "Q4_K": 0.080388547,
    "Q6_K": 0.020107927,
}


def error(rows, name, importance=None, weights=1):
    back = dequantized(quantized(rows, BY_NAME[name], importance), BY_NAME[name])
    return float(np.sqrt(np.mean(weights * (back.astype(np.float64) - rows) ** 2)))


@pytest.mark.parametrize(("name", "theirs"), [("Q4_K", 0.071425994), ("Q6_K", 0.017766649)])
def test_the_error_is_that_of_llama_cpp(name, theirs):
    """Measured with ggml_quantize_chunk of llama.cpp on these numbers."""
    assert error(NUMBERS, name) == pytest.approx(theirs, rel=1e-3)


def weighted(name):
    searched = error(NUMBERS, name, IMPORTANCE, IMPORTANCE)
    assert searched <= 1.01 * THEIRS[name]
    assert searched < 0.92 * error(NUMBERS, name, weights=IMPORTANCE)


@pytest.mark.parametrize("name", THEIRS)
def test_importance_lowers_the_weighted_error_to_that_of_llama_cpp(name):
    weighted(name)


@pytest.mark.parametrize("old", ["importance.astype(np.float32)", "rows.shape)"])
def test_weights_that_are_dropped_or_of_other_numbers_are_caught(old, monkeypatch):
    new = "np.float32(1)" if old.startswith("importance") else "rows.shape)[:, ::-1]"
    mutate(monkeypatch, gguf_blocks, "_searched", old, new)
    for name in ("Q4_0", "Q4_K"):
        with pytest.raises(AssertionError):
            weighted(name)


def test_eight_bits_have_no_search():
    assert not gguf_blocks.is_searched(BY_NAME["Q8_0"])
    both = (quantized(NUMBERS, BY_NAME["Q8_0"], each) for each in (None, IMPORTANCE))
    np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("importance", [None, np.geomspace(1e-6, 1e3, 256, dtype=np.float32)])
@pytest.mark.parametrize("name", ALL)
def test_constant_zero_and_tiny_rows_and_outliers_stay_near(name, importance):
    for value in (0.0, 3.0, -3.0, 1e-9, 1e-30, 1e-42):
        rows = np.full((2, 256), value, np.float32)
        assert error(rows, name, importance) <= 3e-4 * abs(value) + 1e-8
    outlier = np.r_[np.full(255, 0.1), 1e4].astype(np.float32)[None]
    back = dequantized(quantized(outlier, BY_NAME[name], importance), BY_NAME[name])
    assert np.abs(back - outlier).max() <= 4
    for value, why in ((np.nan, "not finite"), (np.inf, "not finite"), (1e30, "beyond the range")):
        with pytest.raises(ValueError, match=why):
            quantized(np.full((1, 256), value, np.float32), BY_NAME[name], importance)
