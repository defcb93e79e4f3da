"""Places of tokens, and the choice of the way to the keys."""

import jax
import numpy as np
import pytest

from jaxlm.parallel import context, context_keys, mesh
from jaxlm.parallel.config import MeshConfig

LAYER = dict(ways=4, rows=2, heads=4, kv_heads=2, head_dim=8, value_dim=8, itemsize=2, dropout=0.0)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_the_order_is_a_permutation_that_gives_every_device_the_same_number_of_visible_keys(parts):
    length = 4 * parts
    slots = context.zigzag_order(length, parts)
    assert sorted(slots) == list(range(length))
    visible = (slots + 1).reshape(parts, -1).sum(1)  # a causal query in slot i sees i + 1 keys
    assert len(set(visible)) == 1
    # Each device's slots are an early chunk and a late one, both in order.
    for mine in slots.reshape(parts, 2, -1):
        assert (np.diff(mine) == 1).all()


def test_four_devices_hold_these_chunks():
    assert context.zigzag_order(8, 4).tolist() == [0, 7, 1, 6, 2, 5, 3, 4]


def test_slots_that_make_no_equal_chunks_are_refused():
    with pytest.raises(ValueError, match="12 slots do not divide into 8 chunks"):
        context.zigzag_order(12, 4)


def test_dealing_is_undone():
    grid = mesh.build(MeshConfig(data=1, context=4), jax.devices()[:4])
    rows = {"a": np.arange(32).reshape(2, 16), "b": np.arange(32.0).reshape(2, 16)}
    with jax.set_mesh(grid):
        zigzag = jax.jit(lambda tree: context.zigzag_shard(tree, 4))(rows)
        back = jax.jit(lambda tree: context.zigzag_unshard(tree, 4))(zigzag)
    np.testing.assert_array_equal(zigzag["a"], rows["a"][:, context.zigzag_order(16, 4)])
    assert {shard.data.shape for shard in zigzag["a"].addressable_shards} == {(2, 4)}
    for name in rows:
        np.testing.assert_array_equal(back[name], rows[name])


def test_keys_are_gathered_while_a_layer_is_small_and_go_round_beyond():
    small = context_keys.choose("auto", length=1024, **LAYER)
    # 2 x 2 x 1024 x 2 x 8 x 2 bytes of keys and values, 4 x 2 x 4 x 256 x 1024 of scores
    assert small == (
        "gather",
        "gathered keys, values and scores of a layer are 8.12 MiB a device, within 256",
    )
    large = context_keys.choose("auto", length=8192, **LAYER)
    assert large.keys == "ring"
    assert large.reason.endswith("513 MiB a device, above 256")
    assert context_keys.choose("auto", length=8192, **LAYER | {"dropout": 0.1}).keys == "gather"
    assert context_keys.choose("ring", length=64, **LAYER).keys == "ring"
    assert context_keys.choose("gather", length=8192, **LAYER).keys == "gather"
