import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.batch import Tokens
from jaxlm.parallel import host, mesh
from jaxlm.parallel.config import MeshConfig


@pytest.fixture(scope="module")
def grid():
    return mesh.build(MeshConfig(data=2, fsdp=2, tensor=2))


def test_one_host_reads_every_row(grid):
    assert host.host_rows(grid, 12) == slice(0, 12)


def test_rows_that_do_not_divide_are_refused_with_the_number_of_devices_that_share_them(grid):
    host.check_rows(grid, 16, 2)
    with pytest.raises(ConfigError) as caught:
        host.check_rows(grid, 10, 1)
    assert caught.value.fix == "--cpu_devices=4", "two ways by tensor, and 10 rows by 2"
    with pytest.raises(ConfigError) as caught:
        host.check_rows(grid, 4, 2)
    assert caught.value.fix == "--cpu_devices=4"


def test_a_batch_is_placed_row_by_row(grid):
    batch = Tokens(*(np.arange(8 * 3, dtype=np.int32).reshape(8, 3) for _ in range(5)))
    placed = host.put(grid, batch)
    assert np.array_equal(placed.tokens, batch.tokens)
    assert placed.tokens.sharding == host.batch_sharding(grid)
    assert {shard.data.shape for shard in placed.tokens.addressable_shards} == {(2, 3)}


@pytest.mark.parametrize(
    ("sizes", "processes", "shares"),
    [
        ({"data": 2, "context": 4}, 2, [slice(0, 4), slice(4, 8)]),  # a row within a process
        ({"context": 8}, 2, [slice(0, 8)] * 2),  # each has half of every row
        ({"data": 2, "context": 2, "tensor": 2}, 4, [slice(0, 4)] * 2 + [slice(4, 8)] * 2),
        ({"pipe": 2, "data": 2, "context": 2}, 2, [slice(0, 8)] * 2),  # copies
    ],
    ids=str,
)
def test_processes_read_the_rows_and_hand_over_the_tokens_that_their_devices_hold(
    sizes, processes, shares
):
    """Eight devices in equal runs, as processes have them; their parts make the whole batch."""
    grid = mesh.build(MeshConfig(**({"data": 1} | sizes)))
    batch = np.arange(8 * 16).reshape(8, 16)
    devices = np.array(grid.devices.flat).reshape(processes, -1)
    index_of = host.batch_sharding(grid).devices_indices_map(batch.shape)
    for local, share in zip(devices, shares, strict=True):
        rows = host.host_rows(grid, 8, list(local))
        assert rows == share
        for device in local:
            part = host.part(batch[rows], index_of[device], rows.start)
            assert part.shape == (8 // sizes.get("data", 1), 16 // sizes["context"])
            np.testing.assert_array_equal(part, batch[index_of[device]])


def test_a_row_is_placed_part_by_part():
    grid = mesh.build(MeshConfig(data=2, context=4))
    batch = np.arange(8 * 16, dtype=np.int32).reshape(8, 16)
    placed = host.put(grid, batch)
    np.testing.assert_array_equal(placed, batch)
    assert placed.sharding == host.batch_sharding(grid)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(4, 4)}
