import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
from jaxlm.core.errors import DataError
from jaxlm.parallel import mesh
from jaxlm.parallel.config import MeshConfig


def tree(scale=1.0):
    return {
        "params": {"w": jnp.arange(32.0).reshape(8, 4) * scale, "b": jnp.ones((4,), jnp.bfloat16)},
        "step": jnp.int32(3),
    }


def shapes_of(value):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), value
    )


def test_a_saved_step_comes_back_bit_for_bit_with_its_json(tmp_path):
    store = Store(tmp_path, CheckpointConfig())
    store.save(3, tree(0.1), {"cursor": 3, "loss": 0.1})
    store.close()
    reopened = Store(tmp_path, CheckpointConfig())
    assert reopened.steps() == [3]
    assert reopened.record(3).meta == {"cursor": 3, "loss": 0.1}
    back = reopened.restore(3, shapes_of(tree()))
    jax.tree.map(np.testing.assert_array_equal, back, tree(0.1))
    reopened.close()


def test_it_restores_onto_another_mesh(tmp_path):
    store = Store(tmp_path, CheckpointConfig())
    store.save(1, tree(), {})
    store.wait()
    grid = mesh.build(MeshConfig(data=2, fsdp=2, tensor=2))
    split = NamedSharding(grid, PartitionSpec("fsdp", "tensor"))
    target = shapes_of(tree())
    target["params"]["w"] = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=split)
    back = store.restore(1, target)
    assert back["params"]["w"].sharding == split
    np.testing.assert_array_equal(back["params"]["w"], tree()["params"]["w"])
    store.close()


def test_a_part_comes_alone(tmp_path):
    store = Store(tmp_path, CheckpointConfig())
    store.save(1, tree(2.0), {})
    store.close()
    reader = Store(tmp_path, CheckpointConfig(), read_only=True)
    back = reader.restore_part(1, "params", shapes_of(tree())["params"])
    jax.tree.map(np.testing.assert_array_equal, back, tree(2.0)["params"])


def test_the_newest_and_the_best_are_kept(tmp_path):
    store = Store(tmp_path, CheckpointConfig(keep_last=2, keep_best=1))
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 2.5)):
        store.save(step, tree(), {}, loss_nats=loss, healthy=False)
        store.wait()
    store.close()
    store = Store(tmp_path, CheckpointConfig(), read_only=True)
    assert store.steps() == [2, 4, 5]
    assert store.best() == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w["params"].pop("b"), "params/b: want nothing, found bfloat16[4]"),
        (lambda w: w["params"].update(c=w["step"]), "params/c: want int32[], found nothing"),
        (
            lambda w: w["params"].update(b=jax.ShapeDtypeStruct((4,), jnp.float32)),
            "params/b: want float32[4], found bfloat16[4]",
        ),
        (
            lambda w: w["params"].update(w=jax.ShapeDtypeStruct((4, 8), jnp.float32)),
            "params/w: want float32[4, 8], found float32[8, 4]",
        ),
    ],
    ids=["left over", "missing", "dtype", "shape"],
)
def test_a_leaf_that_does_not_fit_is_named_and_nothing_is_restored(tmp_path, change, message):
    store = Store(tmp_path, CheckpointConfig())
    store.save(1, tree(), {})
    store.wait()
    target = shapes_of(tree())
    change(target)
    with pytest.raises(DataError) as caught:
        store.restore(1, target)
    assert message in caught.value.why
    assert caught.value.code == 65
    store.close()


def test_what_a_killed_process_left_half_written_is_removed_and_is_no_step(tmp_path):
    torn = tmp_path / "7.orbax-checkpoint-tmp"
    torn.mkdir(parents=True)
    (torn / "part").write_text("x")
    assert Store(tmp_path, CheckpointConfig(), read_only=True).steps() == []
    assert torn.exists(), "a reader removes nothing"
    store = Store(tmp_path, CheckpointConfig())
    assert store.steps() == []
    assert not torn.exists()
    store.close()
