"""Sharpness of attention if a bias is added to its scores."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxlm.ops import masks
from jaxlm.ops.attention import attention_figures

ROWS, LENGTH, HEADS, KV_HEADS, SIZE = 2, 6, 4, 2, 8


def test_the_entropy_is_that_of_biased_scores_and_the_peak_that_of_products():
    draw = np.random.default_rng(0)
    query = draw.normal(size=(ROWS, LENGTH, HEADS, SIZE)).astype(np.float32)
    keys = draw.normal(size=(ROWS, LENGTH, KV_HEADS, SIZE)).astype(np.float32)
    bias = draw.normal(size=(1, HEADS, LENGTH, LENGTH)).astype(np.float32)
    mask = dataclasses.replace(masks.both_ways(LENGTH), bias=jnp.asarray(bias))
    peak, entropy, queries = attention_figures(query, keys, mask, jnp.float32, scale=0.5)
    products = 0.5 * np.einsum(
        "btnh,bsnh->bnts", query.astype(np.float64), np.repeat(keys, HEADS // KV_HEADS, axis=2)
    )
    weights = np.exp(products + bias)
    weights /= weights.sum(-1, keepdims=True)
    expected = -(weights * np.log(weights)).sum(-1).sum((0, 2))
    np.testing.assert_allclose(peak, products.max((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(entropy, expected, rtol=1e-5)
    assert queries == ROWS * LENGTH
