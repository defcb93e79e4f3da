import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import backend
from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.ops import masks
from jaxlm.ops.attention import attention
from jaxlm.ops.flash import query_product

ROWS, LENGTH, HEADS, KV_HEADS, SIZE = 2, 9, 4, 2, 6
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 2, 2, 2, 2, 0, 0, 0]], np.int32)


def reference(query, key, value, *, scale, window, softcap, segments):
    """One row, one head and one query at a time, over the keys that it may see.

    Args:
      query, key, value: operands.
      scale: factor of the scores.
      window, softcap: settings of the attention.
      segments: documents of the slots.
    """
    out = np.zeros(query.shape)
    for row, head, t in np.ndindex(ROWS, HEADS, LENGTH):
        first = 0 if window is None else max(0, t - window + 1)
        seen = [
            s
            for s in range(first, t + 1)
            if segments is None or segments[row, s] == segments[row, t] > 0
        ]
        if not seen:
            continue
        shared = head * KV_HEADS // HEADS
        scores = scale * key[row, seen, shared] @ query[row, t, head]
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[row, t, head] = weights / weights.sum() @ value[row, seen, shared]
    return out


@pytest.mark.few(4)
@pytest.mark.parametrize("segments", [None, SEGMENTS])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 2.0), (1, 0.5)])
def test_attention_is_what_it_says_query_by_query(window, softcap, segments):
    keys = jax.random.split(jax.random.key(0), 3)
    query = 3 * jax.random.normal(keys[0], (ROWS, LENGTH, HEADS, SIZE))
    key = jax.random.normal(keys[1], (ROWS, LENGTH, KV_HEADS, SIZE))
    value = jax.random.normal(keys[2], (ROWS, LENGTH, KV_HEADS, SIZE))
    index = np.arange(LENGTH, dtype=np.int32)[None]
    mask = masks.Mask(
        query_index=index,
        key_index=index,
        query_segments=segments,
        key_segments=segments,
        window=window,
    )
    got = attention(query, key, value, mask, Precision.float32(), scale=0.7, softcap=softcap)
    expected = reference(
        *map(np.asarray, (query, key, value)),
        scale=0.7,
        window=window,
        softcap=softcap,
        segments=segments,
    )
    assert np.isfinite(got).all()
    real = np.ones((ROWS, LENGTH), bool) if segments is None else segments > 0
    np.testing.assert_allclose(np.asarray(got)[real], expected[real], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_the_softmax_is_float32_where_products_are_bfloat16(kernel):
    """Every exponential and factor of the program, both ways, for each dtype of activations."""
    precision = Precision.of(PrecisionConfig(compute="bfloat16"))
    query, key, value = (
        jnp.ones((ROWS, LENGTH, n, SIZE), jnp.bfloat16) for n in (HEADS, KV_HEADS, KV_HEADS)
    )

    def total(*operands):
        mask = masks.causal(LENGTH)
        return attention(*operands, mask, precision, scale=0.7, kernel=kernel).sum()

    program = str(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(query, key, value))
    assert set(re.findall(r":(\w+)\[[^]]*\] = exp2?\b", program)) == {"f32"}
    dtypes = dict(re.findall(r"\b(\w+):(\w+)\[", program))
    factors = re.findall(r"= dot_general\[.*?\] (\w+) (\w+)", program, re.DOTALL)
    assert len(factors) >= 6
    assert {dtypes[name] for pair in factors for name in pair} == {"bf16"}


def test_a_dropped_weight_is_zero_and_the_others_make_up_for_it():
    """Over values of one, a query gives the sum of its weights: 1 on average, 0 or 2 of one."""
    query, key = jax.random.normal(jax.random.key(0), (2, 64, LENGTH, HEADS, SIZE))
    ones = jnp.ones((64, LENGTH, HEADS, SIZE))

    def out(dropout_key):
        return attention(
            query,
            key,
            ones,
            masks.causal(LENGTH),
            Precision.float32(),
            scale=1.0,
            dropout=0.5,
            dropout_key=dropout_key,
        )

    np.testing.assert_allclose(out(None), 1.0, rtol=1e-5)
    dropped = np.asarray(out(jax.random.key(1)))[..., 0]
    np.testing.assert_allclose(np.unique(dropped[:, 0]), [0.0, 2.0])
    np.testing.assert_allclose(dropped.mean(), 1.0, atol=0.05)
    assert len(np.unique(dropped[:, -1])) > 64


@pytest.mark.parametrize(
    ("platform", "groups", "dtype", "rows"),
    [
        ("cpu", 1, "bfloat16", 2),
        ("cpu", 3, "bfloat16", 3),
        ("cpu", 1, "float32", 1),
        ("gpu", 1, "bfloat16", 1),
    ],
)
def test_one_query_of_bfloat16_comes_twice_on_a_cpu(platform, groups, dtype, rows):
    key = jax.random.normal(jax.random.key(0), (2, 3, 128, 64), dtype)
    query = jax.random.normal(jax.random.key(1), (2, 3, groups, 1, 64), dtype)

    def product(query, key):
        return query_product("bkgth,bksh->bkgts", query, key)

    with backend.compiling_for(platform):
        program = str(jax.make_jaxpr(product)(query, key))
    lengths = re.findall(rf"\[2,3,{groups},(\d+),128\]", program)
    assert max(map(int, lengths)) * groups == rows
    scores = product(query, key)
    expected = np.einsum("bkgth,bksh->bkgts", *(np.asarray(x, np.float64) for x in (query, key)))
    assert scores.shape == expected.shape
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=2e-5)


def test_no_cache_of_bfloat16_is_converted_for_one_query():
    query, key = (jax.ShapeDtypeStruct((2, 3, *n, 64), jnp.bfloat16) for n in ((1, 1), (128,)))
    program = jax.jit(lambda q, k: query_product("bkgth,bksh->bkgts", q, k)).lower(query, key)
    is_converted = "f32[2,3,128,64]" in program.compile().as_text()
    assert not is_converted or not backend.cpu_units()
