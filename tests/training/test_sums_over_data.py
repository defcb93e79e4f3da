"""Gradients that each replica sums over its micro-batches are those of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import config, tree
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.data.batch import Tokens
from jaxlm.models.families.llama import Llama
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.loss import token_nll
from jaxlm.parallel import hlo, host, mesh
from jaxlm.parallel.config import MeshConfig
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import divisibility
from jaxlm.training import gradient
from jaxlm.training.config import TrainConfig
from jaxlm.training.gradient import GradientSpec

ROWS, LENGTH, VOCAB, PARTS = 16, 12, 64, 2
MODEL = Llama(vocab=VOCAB, width=16, depth=2, heads=4, kv_heads=2, hidden=32)
FROZEN = frozenset({"final_norm/scale"})


def rows():
    """Rows of two documents with uneven weights; some rows have none."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    index = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
    cut = draw.integers(3, 9, (ROWS, 1))
    weights = (draw.random((ROWS, LENGTH)) < draw.random((ROWS, 1))).astype(np.float32)
    weights[:3] = 0
    segments = np.where(index < cut, 1, 2).astype(np.int32)
    positions = np.where(index < cut, index, index - cut).astype(np.int32)
    return Tokens(tokens[:, :-1], tokens[:, 1:], weights, segments, positions)


def differentiated(sizes, compute="float32", **options):
    """Mean gradient, loss, largest logits, and the sums over `data` in the program.

    Args:
      sizes: axis sizes of the mesh.
      compute: dtype of the products; in float16 the loss is scaled.
      options: of the `GradientSpec`.
    """
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    run = Run(
        model=MODEL,
        mesh=MeshConfig(**{"data": 1} | sizes),
        train=TrainConfig(batch=ROWS, microbatches=PARTS),
        precision=PrecisionConfig(compute=compute),
    )
    grid = mesh.build(run.mesh, devices)
    with jax.set_mesh(grid):
        built = setup.build_sharded_model(run, VOCAB, grid)
        blueprint = built.blueprint

        def loss(params, batch, key):
            return token_nll(blueprint.merge(params), batch, None, LossConfig())

        spec = GradientSpec(
            loss=loss,
            precision=built.precision,
            axes=blueprint.axes,
            shardings=built.gradients,
            microbatches=PARTS,
            frozen=FROZEN,
            **options,
        )
        mean = gradient.build_gradient(spec, capture=("logits",))
        params = jax.jit(blueprint.init, out_shardings=built.shardings)(jax.random.key(0))
        inputs = params, host.put(grid, rows()), jax.random.key(1), jnp.float32(8)
        compiled = jax.jit(mean).lower(*inputs).compile()
        sums = [
            each.times
            for each in hlo.read_collectives(compiled.as_text())
            if "data" in each.axes(grid.shape) and max(len(s.sizes) for s in each.shapes) > 1
        ]
        grads, part, captured = compiled(*inputs)
    (peaks,) = tree.leaves(captured.peaks).values()
    return tree.leaves(grads), part.objective, peaks, sums


MESHES = [
    {"data": 4},
    {"data": 2, "fsdp": 2},
    {"data": 2, "tensor": 2},
    {"data": 2, "context": 2},
]


@pytest.fixture(scope="module")
def expected():
    return differentiated({"data": 1})


@pytest.mark.few(2)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_mesh_with_replicas_has_the_gradient_of_one_device(expected, sizes):
    grads, loss, peaks, sums = differentiated(sizes, sums_locally=True)
    assert sums
    assert set(sums) == {1}, "the gradients of each micro-batch are summed over data"
    assert float(loss.total) == pytest.approx(float(expected[1].total), rel=1e-6)
    assert float(loss.weight) == float(expected[1].weight) == rows().weights.sum()
    np.testing.assert_allclose(peaks, expected[2], rtol=1e-5)
    assert expected[0].keys() == grads.keys()
    assert not FROZEN & grads.keys()
    for path, leaf in expected[0].items():
        size = float(jnp.abs(leaf).max())
        np.testing.assert_allclose(grads[path], leaf, atol=1e-5 * size, rtol=1e-5, err_msg=path)


def test_a_scaled_loss_has_the_scale_of_the_whole_micro_batch(expected):
    grads, *_ = differentiated(MESHES[1], "float16", sums_locally=True)
    for path, leaf in expected[0].items():
        size = float(jnp.abs(leaf).max())
        np.testing.assert_allclose(grads[path], leaf, atol=0.02 * size, err_msg=path)


def test_without_it_each_micro_batch_is_summed(expected):
    assert max(differentiated(MESHES[0])[3]) >= PARTS


@pytest.mark.parametrize(
    ("settings", "is_local"),
    [
        ({}, True),
        ({"mesh.fsdp": "2", "objective.name": "mtp"}, True),
        ({"mesh.data": "1", "mesh.fsdp": "4"}, False),
        ({"mesh.pipe": "2", "model.depth": "4"}, False),
        ({"train.microbatches": "1"}, False),
        ({"regularization.residual_dropout": "0.1"}, False),
        ({"regularization.attention_dropout": "0.1"}, False),
        ({"regularization.embedding_dropout": "0.1"}, False),
        ({"regularization.embedding_noise": "5"}, False),
        ({"regularization.layer_drop": "0.1"}, False),
        ({"model.family": "mixtral"}, False),
        ({"tune.name": "lora"}, False),
        ({"objective.name": "distill", "objective.teacher": "runs/a"}, False),
        ({"objective.name": "distill", "objective.stored": "stored"}, True),
        ({"objective.name": "preference", "data.kind": "pairs", "data.train": "a.jsonl"}, False),
        (
            {
                "objective.name": "policy",
                "data.kind": "prompts",
                "data.train": "a.jsonl",
                "reward.functions": "number",
            },
            False,
        ),
        ({"model.family": "t5", "objective.name": "span"}, True),
        (
            {
                "model.family": "t5",
                "objective.name": "span",
                "regularization.attention_dropout": "0.1",
            },
            False,
        ),
    ],
    ids=str,
)
def test_only_a_loss_of_rows_alone_is_summed_by_replicas(settings, is_local):
    known = {"mesh.data": "2", "mesh.fsdp": "1", "train.microbatches": "4"} | settings
    run = config.load(Run, None, list(known.items())).value
    sizes = {axis: int(getattr(run.mesh, axis)) for axis in ("data", "fsdp", "pipe", "expert")}
    model = dataclasses.replace(run.model, vocab=VOCAB).build()
    assert divisibility.sums_locally(run, model, sizes) == is_local
