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


def test_rows_that_do_not_divide_are_refused_with_the_nearest_that_do(grid):
    host.check_rows(grid, 16, 2)
    with pytest.raises(ConfigError) as caught:
        host.check_rows(grid, 10, 1)
    assert caught.value.fix.splitlines() == ["--config.train.batch=8", "--config.train.batch=12"]
    with pytest.raises(ConfigError) as caught:
        host.check_rows(grid, 4, 2)
    assert caught.value.fix.splitlines() == ["--config.train.batch=8"]


def test_a_batch_is_placed_row_by_row(grid):
    batch = Tokens(*(np.arange(8 * 3, dtype=np.int32).reshape(8, 3) for _ in range(5)))
    placed = host.put(grid, batch)
    assert np.array_equal(placed.tokens, batch.tokens)
    assert placed.tokens.sharding == host.batch_sharding(grid)
    assert {shard.data.shape for shard in placed.tokens.addressable_shards} == {(2, 3)}
