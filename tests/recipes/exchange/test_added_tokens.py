"""Rows of added ids, in every leaf that has a row, a column or a number for each id."""

import numpy as np
import pytest

from jaxlm.recipes.exchange import import_model

KNOWN, SIZE = 3, 5


class Reader:
    """Leaves that are numbered through, as far as ids are known."""

    def leaf(self, path, shape, within, dtype):
        axis = import_model.VOCAB_AXES[path]
        assert within[axis].stop <= KNOWN
        return np.arange(np.prod(shape)).reshape(shape)[within].astype(dtype)


@pytest.mark.parametrize(
    ("path", "shape"),
    [("embedding/table", (SIZE, 4)), ("unembedding/weight", (4, SIZE)), ("head/bias", (SIZE,))],
)
def test_added_ids_have_the_mean_of_the_others(path, shape):
    axis = import_model.VOCAB_AXES[path]
    extended = import_model.MeanInitRows(Reader(), KNOWN)
    whole = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    known = np.take(whole, range(KNOWN), axis)
    mean = known.mean(axis, keepdims=True)
    expected = np.concatenate([known, mean, mean], axis)
    for begin, end in ((0, SIZE), (1, 4), (4, 5)):
        within = tuple(
            slice(begin, end) if number == axis else slice(0, size)
            for number, size in enumerate(shape)
        )
        leaf = extended.leaf(path, shape, within, np.dtype(np.float32))
        np.testing.assert_allclose(leaf, expected[within], rtol=1e-6)
