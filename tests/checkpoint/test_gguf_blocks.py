"""Blocks of 256 numbers are as good as llama.cpp's own, and no input makes a bad one."""

import numpy as np
import pytest

from jaxlm.checkpoint.gguf_blocks import BY_NAME, dequantized, quantized

NUMBERS = np.random.default_rng(0).normal(size=(64, 1024)).astype(np.float32)
ALL = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K")


def error(rows, name):
    back = dequantized(quantized(rows, BY_NAME[name]), BY_NAME[name])
    return float(np.sqrt(np.mean((back.astype(np.float64) - rows) ** 2)))


@pytest.mark.parametrize(("name", "theirs"), [("Q4_K", 0.071425994), ("Q6_K", 0.017766649)])
def test_the_error_is_that_of_llama_cpp(name, theirs):
    """Measured with ggml_quantize_chunk of llama.cpp on these numbers."""
    assert error(NUMBERS, name) == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("name", ALL)
def test_constant_zero_and_tiny_rows_and_outliers_stay_near(name):
    for value in (0.0, 3.0, -3.0, 1e-9, 1e-30, 1e-42):
        assert error(np.full((2, 256), value, np.float32), name) <= 3e-4 * abs(value) + 1e-8
    outlier = np.r_[np.full(255, 0.1), 1e4].astype(np.float32)[None]
    back = dequantized(quantized(outlier, BY_NAME[name]), BY_NAME[name])
    assert np.abs(back - outlier).max() <= 4
    for value, why in ((np.nan, "not finite"), (np.inf, "not finite"), (1e30, "beyond the range")):
        with pytest.raises(ValueError, match=why):
            quantized(np.full((1, 256), value, np.float32), BY_NAME[name])
