"""Gumbel noise: that of keys is JAX's; that of seeds is fair, equal on every mesh, and small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.ops import gumbel
from jaxlm.ops.cross_entropy import in_chunks, token_scores
from jaxlm.parallel import mesh
from jaxlm.parallel.config import MeshConfig

COUNT, IDS = 400_000, 32
LOGITS = np.asarray(2 * np.random.default_rng(0).normal(size=IDS), np.float32)
SEEDS = {
    "drawn": lambda: (jax.random.bits(jax.random.key(1), (COUNT,)) >> 1).astype(jnp.int32),
    "counted": lambda: jnp.arange(COUNT, dtype=jnp.int32),
    "far apart": lambda: jnp.arange(COUNT, dtype=jnp.int32) * 4096,
}


def sampled(seeds):
    logits = jnp.broadcast_to(LOGITS, (COUNT, IDS))
    return np.asarray(jax.jit(gumbel.sample)(logits, seeds))


def surplus(counts, expected):
    """By how many standard deviations a chi-square statistic is above its mean."""
    square = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.size - 1
    return (square - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [1, 2, 32_001])
def test_noise_of_a_key_has_the_bits_of_jax(size):
    keys = jax.random.split(jax.random.key(7), 8)

    @jax.jit
    def of_jax(keys):
        return jax.vmap(lambda key: jax.random.gumbel(key, (size,)))(keys)

    expected, actual = of_jax(keys), jax.jit(gumbel.noise, static_argnums=1)(keys, size)
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def test_noise_of_keys_is_computed_without_a_loop_over_arrays():
    keys = jax.ShapeDtypeStruct((8,), jax.random.key(0).dtype)
    text = jax.jit(lambda keys: gumbel.noise(keys, 4096)).lower(keys).compile().as_text()
    assert "while" not in text


@pytest.mark.few(2)
@pytest.mark.parametrize("seeds", SEEDS)
def test_ids_are_as_frequent_as_they_are_likely_and_tell_nothing_of_the_next(seeds):
    ids = sampled(SEEDS[seeds]())
    wide = LOGITS.astype(np.float64)
    likely = np.exp(wide) / np.exp(wide).sum()
    assert surplus(np.bincount(ids, minlength=IDS), COUNT * likely) < 4
    for lag in (1, 7, 64):
        pairs = np.bincount(ids[:-lag] * IDS + ids[lag:], minlength=IDS * IDS)
        together = np.outer(likely, likely).ravel()
        # Rare pairs are counted together, as a chi-square of few cases is none.
        is_rare = (COUNT - lag) * together < 10
        counts = np.append(pairs[~is_rare], pairs[is_rare].sum())
        expected = (COUNT - lag) * np.append(together[~is_rare], together[is_rare].sum())
        assert surplus(counts, expected) < 4, lag


@pytest.mark.slow
def test_ids_of_a_large_vocabulary_are_even_where_all_are_as_likely():
    """The smallest of 2^17 uniform numbers decides: 24 bits would prefer the first ids in ties."""
    vocab, count = 2**17, 1024
    seeds = jnp.arange(count, dtype=jnp.int32)
    ids = np.asarray(jax.lax.map(lambda seed: gumbel.sample(jnp.zeros(vocab), seed), seeds))
    assert surplus(np.bincount(ids // 4096, minlength=32), np.full(32, count / 32)) < 4
    assert len(np.unique(ids)) > 0.98 * count


def test_an_id_of_minus_infinity_is_never_sampled():
    logits = jnp.zeros((1000, 4)).at[:, 2].set(-jnp.inf)
    assert set(np.asarray(gumbel.sample(logits, jnp.arange(1000)))) == {0, 1, 3}


@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", [{"tensor": 4}, {"fsdp": 2, "tensor": 2}, {"data": 4}], ids=str)
def test_meshes_chunks_and_parts_of_a_batch_sample_the_same_ids(sizes):
    rows, length, vocab = 4, 10, 508
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(size=(rows, length, vocab)), jnp.float32)
    seeds = jnp.asarray(rng.integers(0, 2**31, (rows, length)), jnp.int32)
    expected = np.asarray(jax.jit(gumbel.sample)(logits, seeds))
    assert len(np.unique(expected)) > 30
    for row in range(rows):
        part = jax.jit(gumbel.sample)(logits[row : row + 1], seeds[row : row + 1])
        np.testing.assert_array_equal(part[0], expected[row])
    grid = mesh.build(MeshConfig(**{"data": 1} | sizes), jax.devices()[:4])
    over = PartitionSpec(("data", "fsdp"), None, "tensor")
    with jax.set_mesh(grid):
        placed = jax.device_put(logits, NamedSharding(grid, over))
        for chunk in (None, 8):
            ids = jax.jit(lambda x, s, n=chunk: in_chunks(gumbel.sample, x, s, tokens=n))(
                placed, jax.device_put(seeds, NamedSharding(grid, PartitionSpec(over[0])))
            )
            np.testing.assert_array_equal(ids, expected)


def test_sampled_labels_take_no_more_memory_than_given_ones():
    """Memory of the loss and its gradient by the logits."""
    rows, length, vocab = 4, 64, 2048
    logits = jax.ShapeDtypeStruct((rows, length, vocab), jnp.float32)
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def given(logits, ids):
        return token_scores(logits, ids).nll.sum()

    def drawn(logits, seeds):
        return given(logits, gumbel.sample(jax.lax.stop_gradient(logits), seeds))

    sizes = [
        jax.jit(jax.grad(loss)).lower(logits, ids).compile().memory_analysis().temp_size_in_bytes
        for loss in (given, drawn)
    ]
    assert sizes[1] - sizes[0] < 0.1 * logits.size * 4, sizes
