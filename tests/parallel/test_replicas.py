import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.parallel import mesh
from jaxlm.parallel.config import MeshConfig
from jaxlm.parallel.replicas import Replicas


@pytest.fixture(scope="module")
def grid():
    return mesh.build(MeshConfig(data=2, fsdp=2), jax.devices()[:4])


def spoilt(array, device, bit=0):
    """The same array with one bit of one device's copy flipped."""
    parts = []
    for shard in array.addressable_shards:
        values = np.array(shard.data)
        if shard.device == device:
            values.view(np.uint8).reshape(-1)[0] ^= 1 << bit
        parts.append(jax.device_put(values, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("fsdp", None)])
def test_c10_one_flipped_bit_in_one_copy_names_the_leaf_and_the_device(grid, dtype, spec):
    shardings = {"w": NamedSharding(grid, spec), "b": NamedSharding(grid, PartitionSpec())}
    values = jax.device_put(
        {"w": jnp.linspace(-1, 1, 64, dtype=dtype).reshape(8, 8), "b": jnp.ones(4, dtype)},
        shardings,
    )
    compare = Replicas(grid, shardings)
    assert compare.differences(values) == []
    for bit in (0, 7):
        device = jax.devices()[2]
        differences = compare.differences(values | {"w": spoilt(values["w"], device, bit)})
        assert len(differences) == 1
        assert differences[0].startswith("w on ")
        if spec == PartitionSpec():
            assert differences == [f"w on {device}"]  # three others hold the majority's bits


def test_parts_that_are_nobodys_copy_are_not_compared(grid):
    shardings = {"w": NamedSharding(grid, PartitionSpec("data", "fsdp"))}
    values = jax.device_put({"w": jnp.arange(64.0).reshape(8, 8)}, shardings)
    spoiled = {"w": spoilt(values["w"], jax.devices()[1])}
    assert Replicas(grid, shardings).differences(spoiled) == []
