"""Tokens beyond the next: against float64, document by document, also sharded.

Every parameter is in closed form.
"""

import dataclasses
import typing

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Blueprint
from jaxlm.models.config import HeadKind, MtpConfig
from jaxlm.models.cost import model_cost
from jaxlm.models.cost.tensors import tensors
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.union import EncoderDecoderFamily, EncoderFamily, Family
from jaxlm.nn.moe import ADDED
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.loss import token_nll
from jaxlm.parallel import host, mesh, rules
from jaxlm.parallel.config import MeshConfig
from tests.models.parameters import draw_params
from tests.nn import reference

VOCAB, LENGTH = 40, 12
MODEL = Llama(vocab=VOCAB, width=16, depth=1, heads=4, kv_heads=2, hidden=24)
KINDS = typing.get_args(HeadKind)
OTHERS = (*typing.get_args(EncoderFamily), EncoderDecoderFamily)
DECODERS = [arm for arm in typing.get_args(Family) if arm not in OTHERS]
WEIGHTS = (0.5, 0.25)


def batch():
    """Rows of two documents and padding; some tokens weigh nothing, and others more than one."""
    draw = np.random.default_rng(3)
    rows = 2
    ids = draw.integers(0, VOCAB, (2, rows, LENGTH)).astype(np.int32)
    at = np.arange(LENGTH)[None]
    cut, end = np.array([[5], [2]]), np.array([[10], [12]])
    segments = np.where(at < cut, 1, np.where(at < end, 2, 0)).astype(np.int32)
    positions = np.where(at < cut, at, at - cut).astype(np.int32)
    weights = draw.choice([0.0, 1.0, 2.0], (rows, LENGTH)) * (segments > 0)
    return Tokens(ids[0], ids[1], weights.astype(np.float32), segments, positions)


@pytest.fixture(scope="module", params=KINDS)
def built(request):
    config = dataclasses.replace(MODEL.build(), mtp=MtpConfig(tokens=2, kind=request.param))
    blueprint = Blueprint(config, Precision.float32())
    return blueprint, draw_params(blueprint, std=0.1)


def loss(blueprint, params, rows, **settings):
    return token_nll(
        blueprint.merge(params), rows, None, LossConfig(**settings), mtp_weights=WEIGHTS
    )


def block(x, params, config, positions):
    layer = jax.tree.map(lambda leaf: leaf[0], params)
    read = reference.norm(x, layer["attention_norm"], config.norm)
    x = x + reference.attention(read, layer["attention"], config.attention, positions)
    return x + reference.gated_silu(reference.norm(x, layer["mlp_norm"], config.norm), layer["mlp"])


def expected(blueprint, params, rows):
    """Sums of weighted losses, weights, and weighted hits, by depth, a document at a time."""
    config = blueprint.config
    model = blueprint.merge(params)
    stream = jax.jit(
        lambda params: (
            blueprint.merge(params)
            .hidden(rows.tokens, positions=rows.positions, segments=rows.segments)
            .stream
        )
    )(params)
    stream, params = (
        jax.tree.map(lambda x: np.asarray(x, np.float64), t) for t in (stream, params)
    )
    del model
    table = params["embedding"]["table"]
    unembedding = table.T if config.tied else params["unembedding"]["weight"]
    sums = np.zeros((2, 3))
    for row in range(len(rows.tokens)):
        for segment in (1, 2):
            here = np.flatnonzero(rows.segments[row] == segment)
            x = h = stream[row, here]
            for depth in range(2):
                k, head = depth + 1, params["heads"][str(depth)]
                length = len(here) - k
                if length <= 0:
                    continue
                into = x[:length]
                if config.mtp.kind == "sequential":
                    token = table[rows.tokens[row, here[k:]]]
                    both = [
                        reference.norm(h[:length], head["hidden_norm"], config.final_norm),
                        reference.norm(token, head["token_norm"], config.final_norm),
                    ]
                    into = np.concatenate(both, -1) @ head["join"]["weight"]
                positions = rows.positions[row, here[:length]][None]
                h = block(into[None], head["block"]["0"], config.layers[-1], positions)[0]
                logits = reference.norm(h, head["norm"], config.final_norm) @ unembedding
                targets = rows.targets[row, here[k:]]
                weights = rows.weights[row, here[k:]].astype(np.float64)
                picked = logits[np.arange(length), targets]
                nll = np.log(np.exp(logits).sum(-1)) - picked
                sums[depth] += (
                    (nll * weights).sum(),
                    weights.sum(),
                    ((picked >= logits.max(-1)) * weights).sum(),
                )
    return sums


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("factors", [None, (1, 0)], ids=["all rows", "one row of a mixture"])
def test_each_depth_is_that_of_a_float64_reference(built, factors):
    """The reference sees one document at a time: nothing crosses a border."""
    blueprint, params = built
    rows = batch()
    counted = rows
    if factors is not None:
        ahead = np.repeat(np.array(factors, np.float32)[:, None], LENGTH, axis=1)
        rows, counted = (
            rows._replace(predicts_ahead=ahead),
            rows._replace(weights=rows.weights * ahead),
        )
    actual = jax.jit(lambda params: loss(blueprint, params, rows))(params)
    sums = expected(blueprint, params, counted)
    plain = token_nll(blueprint.merge(params), rows, None, LossConfig())
    assert actual.metrics["loss_nats"].total == pytest.approx(
        float(plain.objective.total), rel=1e-6
    )
    assert actual.objective.weight == rows.weights.sum()
    for depth, (nll, weight, correct) in enumerate(sums, 2):
        mean = actual.metrics[f"ahead_{depth}_nats"]
        assert float(mean.total) == pytest.approx(nll, rel=1e-5)
        assert float(mean.weight) == weight < counted.weights.sum()
        assert float(actual.metrics[f"ahead_{depth}_accuracy"].total) == pytest.approx(correct)
    total = float(plain.objective.total) + np.dot(WEIGHTS, sums[:, 0])
    assert float(actual.objective.total) == pytest.approx(total, rel=1e-5)


@pytest.mark.slow
def test_every_parameter_learns_and_chunks_smoothing_and_z_loss_go_together(built):
    blueprint, params = built
    rows = batch()

    def value(params, chunk):
        return loss(
            blueprint, params, rows, chunk=chunk, label_smoothing=0.1, z_loss=0.01
        ).objective.value

    whole, cut = (jax.jit(jax.grad(value), static_argnums=1)(params, chunk) for chunk in (None, 7))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), whole, cut)


@pytest.mark.slow
def test_a_mesh_gives_the_loss_and_the_gradient_of_one_device(built):
    blueprint, params = built
    rows = jax.tree.map(lambda x: np.concatenate([x, x[::-1]]), batch())

    @jax.jit
    def value(params, rows):
        return jax.value_and_grad(lambda p: loss(blueprint, p, rows).objective.value)(params)

    alone, gradient = value(params, rows)
    grid = mesh.build(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    with jax.set_mesh(grid):
        placed = jax.device_put(params, rules.shardings(grid, blueprint.axes, blueprint.shapes))
        split, theirs = value(placed, host.put(grid, rows))
    assert float(split) == pytest.approx(float(alone), rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), gradient, theirs
    )


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("family", "kind"),
    [*((arm, "sequential") for arm in DECODERS), (Llama, "parallel")],
)
def test_any_family_has_heads_and_their_parameters_are_those_of_the_closed_form(family, kind):
    config = dataclasses.replace(family(vocab=64).build(), mtp=MtpConfig(tokens=2, kind=kind))
    blueprint = Blueprint(config, Precision.float32())
    axes = tree.leaves(blueprint.axes, is_leaf=lambda node: isinstance(node, tuple))
    leaves = {
        path: (tuple(leaf.shape), axes[path])
        for path, leaf in tree.leaves(blueprint.shapes).items()
    }
    assert {each.path: (each.shape, each.axes) for each in tensors(config)} == leaves
    assert model_cost.parameters(config) == tree.count(blueprint.shapes)
    assert any(path.startswith("heads/1/") for path in leaves)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", DECODERS)
def test_any_family_learns_from_further_tokens(family, kind):
    sizes = {"hidden": 24} if hasattr(family(), "hidden") else {}
    if hasattr(family(), "experts"):
        sizes |= {"experts": 4, "top_k": 2}
    if hasattr(family(), "groups"):
        sizes |= {"groups": 2, "top_groups": 1}
    heads = {"kv_heads": 2} if hasattr(family(), "kv_heads") else {}
    model = family(vocab=VOCAB, width=16, depth=2, heads=4, **heads, **sizes)
    config = dataclasses.replace(model.build(), mtp=MtpConfig(tokens=2, kind=kind))
    blueprint = Blueprint(config, Precision.float32())
    params = draw_params(blueprint)
    rows = batch()

    def value(params):
        result = loss(blueprint, params, rows)
        return result.objective.value, result.metrics

    (_, metrics), gradient = jax.jit(jax.value_and_grad(value, has_aux=True))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert all(
        np.abs(leaf).max() > 0
        for leaf in jax.tree.leaves(gradient["heads"]["1"]["block"]["0"]["attention"])
    )
    assert {"ahead_2_nats", "ahead_3_nats"} <= set(metrics)
    assert (ADDED in metrics) == hasattr(family(), "experts")


def test_flops_count_every_head():
    base = MODEL.build()
    counts = {
        kind: model_cost.flops_per_token(
            dataclasses.replace(base, mtp=MtpConfig(tokens=2, kind=kind)), LENGTH, causal=True
        )
        for kind in KINDS
    }
    deeper = dataclasses.replace(base, depth=3)
    layers = model_cost.flops_per_token(deeper, LENGTH, causal=True)
    assert counts["parallel"] == layers + 2 * 6 * VOCAB * 16
    assert counts["sequential"] == counts["parallel"] + 2 * 6 * 2 * 16 * 16
