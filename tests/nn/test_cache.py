import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.nn.cache import LayerCache

ROWS, SLOTS, WINDOW, HEADS, SIZE = 3, 12, 4, 2, 8
DRAW = np.random.default_rng(0)
KEYS, VALUES = DRAW.standard_normal((2, ROWS, SLOTS, HEADS, SIZE)).astype(np.float32)
append = jax.jit(LayerCache.append)


def seen(read, last):
    """Keys and values by index, of those that a query at `last` of each row sees in its window."""
    places = np.broadcast_to(read.indices, (ROWS, read.keys.shape[1]))
    rows = []
    for row, at in enumerate(last):
        slots = [np.flatnonzero(places[row] == i) for i in range(max(0, at - WINDOW + 1), at + 1)]
        assert all(len(each) == 1 for each in slots)
        rows.append(np.concatenate([[read.keys[row, s[0]], read.values[row, s[0]]] for s in slots]))
    return rows


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_query_finds_what_was_written_in_its_window_however_it_was_written(window, dtype):
    """Rows of other lengths, a padded prompt, several tokens, then single ones; a ring forgets."""
    cache = LayerCache.empty(ROWS, SLOTS, (HEADS, SIZE, SIZE), jnp.dtype(dtype), window)
    assert cache.slots == (window or SLOTS)
    start, lengths = np.zeros(ROWS, np.int32), np.array([5, 1, 3], np.int32)
    for size in (5, 3, 1, 1):
        count = lengths - start if size == 5 else np.full(ROWS, size, np.int32)
        index = np.minimum(start[:, None] + np.arange(size), SLOTS - 1)
        new = [np.take_along_axis(np.asarray(x), index[..., None, None], 1) for x in (KEYS, VALUES)]
        cache, read = append(cache, *new, start, count)
        read = jax.tree.map(np.asarray, read)
        for row, visible in enumerate(seen(read, start + count - 1)):
            stop = start[row] + count[row]
            span = slice(max(0, stop - WINDOW), stop)
            expected = np.stack((KEYS[row, span], VALUES[row, span]), 1).reshape(visible.shape)
            bound = np.abs(expected).max(-1, keepdims=True) / 254 if dtype == "int8" else 0.0
            assert (np.abs(visible - expected) <= bound * 1.001).all()
            assert (visible != expected).any() == (dtype == "int8")
        start = start + count
    assert read.keys.dtype == jnp.float32


def test_what_a_token_becomes_does_not_depend_on_those_written_with_it():
    start, count = np.zeros((ROWS,), np.int32), np.full((ROWS,), WINDOW, np.int32)
    empty = LayerCache.empty(ROWS, SLOTS, (HEADS, SIZE, SIZE), jnp.dtype("int8"), WINDOW)
    whole, _ = append(empty, KEYS[:, :WINDOW], VALUES[:, :WINDOW], start, count)
    for place in range(WINDOW):
        one = slice(place, place + 1)
        empty, _ = append(empty, KEYS[:, one], VALUES[:, one], start + np.int32(place), None)
    jax.tree.map(np.testing.assert_array_equal, empty, whole)
