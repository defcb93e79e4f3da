"""Logits and tables stay split if the vocabulary is: read from the compiled gradient."""

import jax
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.loss import token_nll
from jaxlm.parallel import hlo, host, mesh, rules
from jaxlm.parallel.config import MeshConfig

ROWS, LENGTH, WIDTH, VOCAB = 8, 16, 8, 320


def collectives_of(sizes, *, tied, chunk):
    """Those of the loss and its gradient, and the devices' mesh."""
    count = int(np.prod(list(sizes.values())))
    grid = mesh.build(MeshConfig(**{"data": 1} | sizes), jax.devices()[:count])
    family = Llama(vocab=VOCAB, width=WIDTH, depth=1, heads=4, kv_heads=4, hidden=8, tied=tied)
    blueprint = Blueprint(family.build(), Precision.float32())
    layout = rules.shardings(grid, blueprint.axes, blueprint.shapes)

    def put(shape, to):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=to)

    kinds = (np.int32, np.int32, np.float32, np.int32, np.int32)
    shapes = (jax.ShapeDtypeStruct((ROWS, LENGTH), kind) for kind in kinds)
    batch = Tokens(*(put(shape, host.batch_sharding(grid)) for shape in shapes))

    def loss(params, batch):
        settings = LossConfig(chunk=chunk, z_loss=1e-4, label_smoothing=0.1)
        return token_nll(blueprint.merge(params), batch, None, settings).objective.total

    with jax.set_mesh(grid):
        step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, layout))
        text = step.lower(jax.tree.map(put, blueprint.shapes, layout), batch).compile().as_text()
    return hlo.read_collectives(text)


def largest(collectives):
    return max(shape.elements for each in collectives for shape in each.shapes)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("tied", "chunk"), [(True, None), (True, 32), (False, None), (False, 32)], ids=str
)
def test_no_logits_and_no_table_cross_the_devices_that_split_the_vocabulary(tied, chunk):
    collectives = collectives_of({"tensor": 4}, tied=tied, chunk=chunk)
    # One token's logits of each row's chunk would be more than a vocabulary; the table is VOCAB x
    # WIDTH.
    assert {each.kind for each in collectives} == {"all-reduce"}
    assert all(VOCAB not in shape.sizes for each in collectives for shape in each.shapes)
    assert all(VOCAB // 4 not in shape.sizes for each in collectives for shape in each.shapes)
    # The largest thing sent is the stream: what was looked up, or a gradient of it.
    assert largest(collectives) == ROWS * LENGTH * WIDTH


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"context": 2, "tensor": 2}], ids=str)
def test_beside_another_split_only_parameters_and_keys_are_gathered(sizes):
    collectives = collectives_of(sizes, tied=False, chunk=None)
    (other,) = set(sizes) - {"tensor"}
    whole = {"pipe": 1, "data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1} | sizes
    for each in collectives:
        across = each.axes(whole)
        for shape in each.shapes:
            # Over tensor, nothing of the vocabulary; over the other, the local half of both tables,
            # and their gradients.
            if "tensor" in across:
                assert not {VOCAB, VOCAB // 2} & set(shape.sizes), each
            assert shape.elements <= max(VOCAB // 2 * WIDTH, ROWS * LENGTH * WIDTH), each
        if each.kind == "all-gather" and other == "fsdp":
            assert all(set(shape.sizes) <= {VOCAB // 2, WIDTH, 4, 2} for shape in each.shapes), each
