"""Masks against a loop over every query and key."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.ops import masks
from jaxlm.ops.attention import attention
from jaxlm.ops.masks import Mask
from jaxlm.parallel import context

ROWS, LENGTH = 3, 10
SEGMENTS = np.array([[1] * 4 + [2] * 6, [1, 2, 2, 3, 3, 3, 0, 0, 0, 0], [0] * LENGTH], np.int32)
INDEX = np.arange(LENGTH, dtype=np.int32)[None]


def by_loop(query_index, key_index, *, causal=True, window=None, query=None, key=None, reach=None):
    rows = max(len(each) for each in (query_index, key_index, query, key) if each is not None)
    seen = np.zeros((rows, query_index.shape[1], key_index.shape[1]), bool)
    for row, t, s in np.ndindex(seen.shape):
        i, j = query_index[row % len(query_index), t], key_index[row % len(key_index), s]
        seen[row, t, s] = (
            (not causal or j <= (i if reach is None else reach[row, t]))
            and (window is None or (i - j if reach is None else abs(i - j)) < window)
            and (query is None or query[row, t] == key[row, s])
        )
    return seen


@pytest.mark.few(8)
@pytest.mark.parametrize("segments", [None, SEGMENTS])
@pytest.mark.parametrize("window", [None, 1, 3, LENGTH, LENGTH + 5])
@pytest.mark.parametrize("causal", [True, False])
def test_a_query_sees_the_keys_that_the_description_says(causal, window, segments):
    mask = Mask(
        query_index=INDEX,
        key_index=INDEX,
        query_segments=segments,
        key_segments=segments,
        causal=causal,
        window=window,
    )
    expected = by_loop(INDEX, INDEX, causal=causal, window=window, query=segments, key=segments)
    np.testing.assert_array_equal(mask.materialize(), expected)


@pytest.mark.parametrize("window", [None, 4])
def test_rows_of_a_cache_see_up_to_their_own_slot(window):
    query = np.array([[3, 4], [7, 8], [0, 1]], np.int32)
    mask = Mask(query_index=query, key_index=INDEX, window=window)
    np.testing.assert_array_equal(mask.materialize(), by_loop(query, INDEX, window=window))


@pytest.mark.few(3)
@pytest.mark.parametrize("is_queried", [True, False])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("has_reach", [True, False])
def test_keys_before_the_row_are_seen_by_every_segment(window, has_reach, is_queried):
    until = np.minimum(INDEX + 2, LENGTH - 1) * np.ones((ROWS, 1), np.int32) if has_reach else None
    row = dataclasses.replace(masks.causal(LENGTH, SEGMENTS, until), window=window)
    seen = np.asarray(row.preceded(4, is_queried=is_queried).materialize())
    text = seen[:, 4:] if is_queried else seen
    assert text[:, :, :4].all()
    np.testing.assert_array_equal(text[:, :, 4:], row.materialize())
    if is_queried:  # they are causal, and see no text
        np.testing.assert_array_equal(seen[:, :4], [np.tri(4, 4 + LENGTH, dtype=bool)] * ROWS)


def test_the_mask_of_a_row_is_causal_within_its_segments():
    np.testing.assert_array_equal(masks.causal(LENGTH).materialize(), by_loop(INDEX, INDEX))
    np.testing.assert_array_equal(
        masks.causal(LENGTH, SEGMENTS).materialize(),
        by_loop(INDEX, INDEX, query=SEGMENTS, key=SEGMENTS),
    )


@pytest.mark.parametrize("window", [None, 3])
def test_a_query_with_a_reach_sees_that_far_and_the_window_to_both_sides(window):
    reach = np.array([[2, 2, 2, 3, 7, 7, 7, 7, 8, 9], [0, 2, 2, 5, 5, 5, 6, 7, 8, 9], [9] * 10])
    mask = Mask(
        query_index=INDEX,
        key_index=INDEX,
        query_segments=SEGMENTS,
        key_segments=SEGMENTS,
        visible_until=reach,
        window=window,
    )
    expected = by_loop(INDEX, INDEX, window=window, query=SEGMENTS, key=SEGMENTS, reach=reach)
    np.testing.assert_array_equal(mask.materialize(), expected)
    with pytest.raises(ValueError, match="visible_until needs a causal mask"):
        Mask(query_index=INDEX, key_index=INDEX, visible_until=reach, causal=False)


def test_texts_of_a_shared_prefix_see_it_and_not_each_other():
    segments = np.array([[1, 1, 2, 3, 3, 4, 5, 0]], np.int32)
    prefixes = np.array([[1, 1, 1, 1, 1, 4, 4, 0]], np.int32)
    seen = np.asarray(masks.causal(8, segments, prefix_segments=prefixes).materialize())[0]
    assert [np.flatnonzero(row).tolist() for row in seen] == [
        *([0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 4], [5], [5, 6], [7]),
    ]
    with pytest.raises(ValueError, match="prefix segments need segments"):
        masks.causal(8, prefix_segments=prefixes)


def test_segments_of_one_side_alone_are_refused():
    for side in ("query_segments", "key_segments"):
        with pytest.raises(ValueError, match="only one of queries and keys has segments"):
            Mask(query_index=INDEX, key_index=INDEX, **{side: SEGMENTS})


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_padding_sees_only_padding_and_every_query_sees_itself(softcap):
    mask = masks.causal(LENGTH, SEGMENTS)
    seen = np.asarray(mask.materialize())
    assert np.diagonal(seen, axis1=1, axis2=2).all()
    padding = SEGMENTS == 0
    assert not (seen & (padding[:, :, None] != padding[:, None, :])).any()
    operands = tuple(
        jax.random.normal(key, (ROWS, LENGTH, 2, 4))
        for key in jax.random.split(jax.random.key(0), 3)
    )

    def loss(operands, weights):
        out = attention(*operands, mask, Precision.float32(), scale=0.5, softcap=softcap)
        return (jnp.square(out) * weights[..., None, None]).sum()

    real = jax.grad(loss)(operands, jnp.asarray(~padding, jnp.float32))
    for gradient in map(np.asarray, real):
        assert np.isfinite(gradient).all()
        assert not gradient[padding].any()
        assert np.abs(gradient[~padding]).max() > 0


@pytest.mark.parametrize("parts", [2, 4])
def test_slots_that_are_dealt_out_see_what_they_saw_before(parts):
    slots = context.zigzag_order(16, parts)
    segments = np.array([[1] * 5 + [2] * 8 + [0] * 3])
    before = masks.causal(16, segments).materialize()
    zigzag = masks.causal(16, segments[:, slots], parts=parts).materialize()
    np.testing.assert_array_equal(zigzag, before[:, slots][:, :, slots])
