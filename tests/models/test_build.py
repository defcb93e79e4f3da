"""Modules to trees of arrays and back, and trees that are born where they belong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlm.core import tree
from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.llama import Llama
from jaxlm.parallel import mesh, rules
from jaxlm.parallel.config import MeshConfig

FAMILIES = {
    "llama": Llama(vocab=64, width=16, depth=2, heads=4, kv_heads=2, hidden=24),
    "gpt2": GPT2(vocab=64, width=16, depth=2, heads=4, max_positions=16),
}
MESHES = {
    "fsdp": MeshConfig(data=1, fsdp=4, tensor=1),
    "tensor and fsdp": MeshConfig(data=1, fsdp=2, tensor=2),
    "data and tensor": MeshConfig(data=2, fsdp=1, tensor=2),
}


@pytest.fixture(scope="module", params=FAMILIES)
def built(request):
    blueprint = Blueprint(FAMILIES[request.param].build(), Precision.float32())
    return blueprint, jax.jit(blueprint.init)(jax.random.key(0))


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", MESHES)
def test_parameters_born_sharded_are_those_of_one_device(built, layout):
    blueprint, alone = built
    grid = mesh.build(MESHES[layout], jax.devices()[:4])
    shardings = rules.shardings(grid, blueprint.axes, blueprint.shapes)
    with jax.set_mesh(grid):
        params = jax.jit(blueprint.init, out_shardings=shardings)(jax.random.key(0))
    places = tree.leaves(shardings)
    for path, leaf in tree.leaves(params).items():
        assert leaf.sharding.is_equivalent_to(places[path], leaf.ndim), path
        # The same bits are drawn; the compiler may round the last step of a normal in another way.
        np.testing.assert_allclose(
            leaf, tree.leaves(alone)[path], rtol=1e-6, atol=1e-8, err_msg=path
        )
    split = [leaf for leaf in jax.tree.leaves(params) if not leaf.is_fully_replicated]
    assert len(split) > len(places) / 3, "hardly anything was split"


@pytest.mark.few(1)
def test_the_sharded_model_gives_the_logits_of_one_device(built):
    blueprint, alone = built
    grid = mesh.build(MESHES["tensor and fsdp"], jax.devices()[:4])
    shardings = rules.shardings(grid, blueprint.axes, blueprint.shapes)
    tokens = np.random.default_rng(0).integers(0, 64, (4, 8)).astype(np.int32)
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), tokens.shape)

    def logits(params):
        model = blueprint.merge(params)
        return model.logits(model.hidden(tokens, positions=positions).values)

    with jax.set_mesh(grid):
        split = jax.jit(logits)(jax.device_put(alone, shardings))
    np.testing.assert_allclose(split, jax.jit(logits)(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.few(1)
def test_shapes_are_those_of_the_parameters_and_cost_nothing_to_know(built):
    blueprint, params = built
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), blueprint.shapes
    )
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(blueprint.shapes))


@pytest.mark.few(1)
def test_merged_parameters_come_out_again_in_their_places(built):
    blueprint, params = built
    leaves, treedef = jax.tree.flatten(params)
    marked = jax.tree.unflatten(
        treedef, [jnp.full_like(x, number) for number, x in enumerate(leaves)]
    )
    model = blueprint.merge(marked)
    assert _corner(nnx.to_pure_dict(nnx.state(model))) == _corner(marked)
    assert float(model.embedding.table[0, 0]) == float(marked["embedding"]["table"][0, 0])


def _corner(params):
    return jax.tree.map(lambda x: float(x.reshape(-1)[0]), params)
