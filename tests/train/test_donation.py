"""A step writes over the state that it reads: there is one on the devices, never two."""

import gc

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.parallel import host, mesh
from jaxlm.parallel.config import MeshConfig
from jaxlm.train import state as states
from tests.train.test_step import GUARD, batches, pieces


def living():
    """Buffers on the devices and their bytes, each once."""
    gc.collect()
    shards = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
        if shard.data.nbytes
    }
    return len(shards), sum(shards.values())


@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_after_a_step_one_state_is_alive(devices):
    grid = mesh.build(MeshConfig(), jax.devices()[:devices])
    blueprint, optimizer, step = pieces()
    compiled = jax.jit(step, donate_argnums=0)
    with jax.set_mesh(grid):
        batch = host.put(grid, next(batches(1)))
        fresh = jax.jit(lambda key: states.fresh(blueprint.init(key), optimizer, GUARD))
        before = living()
        state = fresh(jax.random.key(0))
        one = tuple(np.subtract(living(), before))
        held = tree.leaves(state)
        for _ in range(2):
            state, metrics = compiled(state, batch)
            jax.block_until_ready(metrics)
            del metrics
            count, size = np.subtract(living(), before)
        whole = sum(leaf.nbytes * devices for leaf in jax.tree.leaves(state))
    assert all(leaf.is_deleted() for leaf in held.values())
    assert one[0] == count == len(held) * devices
    assert one[1] == size == whole
