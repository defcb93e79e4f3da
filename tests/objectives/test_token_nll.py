import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import config
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.loss import token_nll
from jaxlm.parallel import host, mesh
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from tests.models.parameters import draw_params


@pytest.fixture(scope="module")
def blueprint():
    return Blueprint(
        Llama(vocab=50, width=16, depth=2, heads=2, kv_heads=1).build(), Precision.float32()
    )


@pytest.fixture(scope="module")
def params(blueprint):
    return draw_params(blueprint)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, (2, 3, 8)).astype(np.int32)
    ones = np.ones((3, 8), np.int32)
    positions = np.tile(np.arange(8, dtype=np.int32), (3, 1))
    return Tokens(
        tokens=ids[0],
        targets=ids[1],
        weights=(ids[0] % 3 > 0).astype(np.float32),
        segments=ones,
        positions=positions,
    )


def objective(blueprint, params, batch, **settings):
    return token_nll(blueprint.merge(params), batch, None, LossConfig(**settings))


def test_the_loss_is_the_weighted_sum_over_a_float64_softmax(blueprint, params, batch):
    @jax.jit
    def computed(params):
        model = blueprint.merge(params)
        fields = {"positions": batch.positions, "segments": batch.segments}
        logits = model.logits(model.hidden(batch.tokens, **fields).values)
        return logits, objective(blueprint, params, batch, z_loss=0.01)

    logits, loss = computed(params)
    logits = np.asarray(logits, np.float64)
    normalizer = np.log(np.exp(logits).sum(-1))
    nll = normalizer - np.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
    assert loss.objective.weight == batch.weights.sum()
    assert float(loss.metrics["loss_nats"].total) == pytest.approx(
        (nll * batch.weights).sum(), rel=1e-5
    )
    assert float(loss.objective.total) == pytest.approx(
        ((nll + 0.01 * normalizer**2) * batch.weights).sum(), rel=1e-5
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("chunk", [None, 9])
def test_a_cap_smoothing_and_the_z_loss_together_are_those_of_float64(batch, params, chunk):
    capped = Llama(vocab=50, width=16, depth=2, heads=2, kv_heads=1).build()
    capped = Blueprint(dataclasses.replace(capped, logit_softcap=0.05), Precision.float32())
    model = capped.merge(params)
    hidden = model.hidden(batch.tokens, positions=batch.positions, segments=batch.segments).values
    plain = dataclasses.replace(capped.config, logit_softcap=None)
    logits = Blueprint(plain, Precision.float32()).merge(params).logits(hidden)
    logits = 0.05 * np.tanh(np.asarray(logits, np.float64) / 0.05)
    assert np.abs(logits).max() > 0.02, "the cap bends something"
    normalizer = np.log(np.exp(logits).sum(-1))
    nll = normalizer - np.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
    every = normalizer - logits.mean(-1)
    settings = dict(z_loss=0.01, label_smoothing=0.2, chunk=chunk)
    loss = objective(capped, params, batch, **settings)
    expected = ((0.8 * nll + 0.2 * every + 0.01 * normalizer**2) * batch.weights).sum()
    assert float(loss.objective.total) == pytest.approx(expected, rel=1e-6)
    assert float(loss.metrics["loss_nats"].total) == pytest.approx(
        (nll * batch.weights).sum(), rel=1e-6
    )
    smoothed = ((0.8 * nll + 0.2 * every) * batch.weights).sum()
    assert float(loss.metrics["smoothed_nats"].total) == pytest.approx(smoothed, rel=1e-6)
    assert "smoothed_nats" not in objective(capped, params, batch).metrics


def test_chunks_change_neither_loss_nor_gradient(blueprint, params, batch):
    def loss(params, chunk):
        settings = dict(chunk=chunk, label_smoothing=0.1)
        return objective(blueprint, params, batch, **settings).objective.value

    (whole, grads), (cut, others) = (
        jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, chunk) for chunk in (None, 9)
    )
    assert float(cut) == pytest.approx(float(whole), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, others)


def test_a_token_of_weight_zero_moves_nothing(blueprint, params, batch):
    changed = batch._replace(targets=np.where(batch.weights > 0, batch.targets, 0))
    ours, other = (objective(blueprint, params, b).objective for b in (batch, changed))
    assert jnp.array_equal(ours.total, other.total)


@pytest.fixture(scope="module")
def packed(batch):
    """Rows of three documents and padding, with positions from 0 in each."""
    segments = np.array([[1, 1, 1, 2, 2, 3, 3, 0]] * 3, np.int32)
    positions = np.array([[0, 1, 2, 0, 1, 0, 1, 0]] * 3, np.int32)
    weights = np.where(segments > 0, batch.weights, 0).astype(np.float32)
    return batch._replace(segments=segments, positions=positions, weights=weights)


def without_mask(blueprint, params, packed):
    return token_nll(blueprint.merge(params), packed, None, LossConfig(), document_mask=False)


def test_without_the_mask_of_documents_a_row_is_one_document(blueprint, params, batch, packed):
    whole = batch._replace(weights=packed.weights)  # one document, positions from 0 on
    one = without_mask(blueprint, params, packed)
    expected = objective(blueprint, params, whole)
    masked = objective(blueprint, params, packed)
    assert float(one.objective.total) == pytest.approx(float(expected.objective.total), rel=1e-6)
    assert float(one.objective.weight) == float(expected.objective.weight)
    assert abs(float(one.objective.total) / float(masked.objective.total) - 1) > 1e-4


@pytest.mark.few(1)
@pytest.mark.parametrize("keys", ["ring", "gather"])
def test_without_the_mask_split_rows_give_the_same(blueprint, params, packed, keys):
    alone = float(without_mask(blueprint, params, packed).objective.total)
    run = config.load(
        Run,
        None,
        [
            *(("model.vocab", "50"), ("model.width", "16"), ("model.depth", "2")),
            *(("model.heads", "2"), ("model.kv_heads", "1"), ("data.sequence", "8")),
            *(("train.batch", "3"), ("mesh.context", "4"), ("mesh.context_keys", keys)),
            ("mesh.data", "1"),
        ],
    ).value
    grid = mesh.build(run.mesh, jax.devices()[:4])
    model = setup.build_sharded_model(run, 50, grid)
    with jax.set_mesh(grid):
        rows = host.put(grid, packed)
        split = jax.jit(lambda p, b: without_mask(model.trained, p, b).objective.total)
        assert float(split(params, rows)) == pytest.approx(alone, rel=1e-5)
