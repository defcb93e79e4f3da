"""A KV cache in blocks gives what a whole one does, with the same bits for any number read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.nn.attention import Attention, LatentAttention, LayerInputs
from jaxlm.nn.cache import BlockedCache, LayerCache
from jaxlm.nn.config import AttentionConfig, Rope
from jaxlm.ops.masks import Mask
from tests.nn import reference
from tests.nn.test_attention_latent import CONFIG as LATENT

ROWS, WIDTH, SLOTS, BLOCK = 3, 20, 24, 8
GROUPED = AttentionConfig(heads=4, kv_heads=2, head_dim=6, softcap=2.0, rotary=Rope(theta=100.0))
KINDS = {"grouped heads": (Attention, GROUPED), "latent": (LatentAttention, LATENT)}
X = jax.random.normal(jax.random.key(0), (ROWS, 20, WIDTH))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("grouped heads", "int8"),
        ("latent", "float32"),
        pytest.param("grouped heads", "float32", marks=pytest.mark.slow),
    ],
)
def test_blocks_give_what_a_whole_cache_gives_however_many_are_read(name, dtype):
    """A prompt of seven, then single tokens; rows begin at other slots."""
    make, config = KINDS[name]
    module, _ = reference.moved(lambda key, init: make(WIDTH, config, key=key, init=init))
    whole = LayerCache.empty(ROWS, SLOTS, config.cached, jnp.dtype(dtype), None)
    blocked = BlockedCache.of(whole, BLOCK)
    assert (blocked.slots, len(blocked.blocks)) == (SLOTS, 3)

    @jax.jit
    def run(x, start, cache, reach):
        at = start[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        mask = Mask(query_index=at, key_index=at)
        return module(x, LayerInputs(at, mask, start=start, reach=reach), cache=cache)

    start = jnp.array([0, 3, 5], jnp.int32)
    for first, last in ((0, 7), *((i, i + 1) for i in range(7, 14))):
        x, reach = X[:, first:last], start.max() + last - first
        expected, whole = run(x, start, whole, None)
        out, written = run(x, start, blocked, reach)
        for more in (reach + BLOCK, SLOTS):
            repeated, _ = run(x, start, blocked, jnp.int32(more))
            np.testing.assert_array_equal(repeated, out)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
        start, blocked = start + last - first, written


def test_a_part_that_was_read_is_put_into_another_row():
    sizes = (2, 4, 4)
    empty = LayerCache.empty(ROWS, SLOTS, sizes, jnp.dtype(jnp.float32), None)
    full = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), empty)
    for cache in (full, BlockedCache.of(full, BLOCK)):
        part = jax.jit(lambda cache, row, start: cache.part(row, start, 4))(cache, 1, 12)
        np.testing.assert_array_equal(part.keys, full.keys[1:2, :, 12:16])
        moved = jax.jit(lambda cache, part: cache.with_part(2, 4, part))(cache, part)
        repeated = moved.part(2, jnp.int32(4), 4)
        np.testing.assert_array_equal(repeated.values, part.values)
        for start in (0, 8, 12, 20):
            moved_part, cache_part = (each.part(2, jnp.int32(start), 4) for each in (moved, cache))
            np.testing.assert_array_equal(moved_part.keys, cache_part.keys)
        cleared = moved.cleared(2)
        assert not np.any(cleared.part(2, jnp.int32(4), 4).values)
        np.testing.assert_array_equal(cleared.part(1, jnp.int32(12), 4).keys, part.keys)
