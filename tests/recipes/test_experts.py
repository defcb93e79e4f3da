"""Training with experts: the losses of one device on every mesh, and refusals."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.data.batch import Tokens
from jaxlm.models.config import balance_rate
from jaxlm.models.families.mistral import Mixtral
from jaxlm.monitor.metric_warnings import DroppedTokenWarning
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.loss import token_nll
from jaxlm.optim import build as optimizers
from jaxlm.optim.config import AdamW, Lion, Muon
from jaxlm.parallel import host, mesh
from jaxlm.parallel.config import MeshConfig
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.training import state as states
from jaxlm.training import step as steps
from jaxlm.training.config import GuardConfig, TrainConfig
from jaxlm.training.step import StepSpec
from tests.faults import harness

ROWS, LENGTH, VOCAB = 8, 16, 64
DROPLESS = Mixtral(
    vocab=VOCAB, width=16, depth=2, heads=2, kv_heads=2, experts=4, hidden=16, router_z=1e-3
)
CAPACITY = dataclasses.replace(
    DROPLESS, capacity=0.8, router="sigmoid", shared=8, balance_bias=0.01, scale=2.0
)
COUNT = 20


def batches():
    """Rows of one or two documents, with padding at some ends and prompts of weight zero."""
    draw = np.random.default_rng(0)
    for _ in range(COUNT):
        tokens = draw.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
        index = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
        cut = draw.integers(4, 12, (ROWS, 1))
        segments = np.where(index < cut, 1, 2).astype(np.int32)
        segments[::2, 12:] = 0
        weights = (segments > 0) * (draw.random((ROWS, LENGTH)) < 0.8)
        yield Tokens(
            tokens[:, :-1],
            tokens[:, 1:],
            weights.astype(np.float32),
            segments,
            np.where(index < cut, index, index - cut).astype(np.int32),
        )


def trained(model, sizes, *, microbatches=1, optim=None, differentiated=False):
    """Metrics of each step on a mesh, the first gradient if requested, and the last parameters.

    Args:
      model: settings of the model.
      sizes: axis sizes of the mesh.
      microbatches: micro-batches per step.
      optim: settings of the optimizer.
      differentiated: also return the first gradient.
    """
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    run = Run(
        model=model,
        mesh=MeshConfig(**{"data": 1} | sizes),
        train=TrainConfig(batch=ROWS, microbatches=microbatches),
    )
    grid = mesh.build(run.mesh, devices)
    with jax.set_mesh(grid):
        built = setup.build_sharded_model(run, VOCAB, grid)
        blueprint, loss = built.blueprint, LossConfig()
        optimizer = optimizers.build(
            optim or AdamW(),
            lambda _: jnp.float32(1e-2),
            blueprint.axes,
            balance_rate=balance_rate(blueprint.config),
        )

        def objective(params, batch, key):
            return token_nll(blueprint.merge(params), batch, key, loss)

        step = steps.build_step(
            StepSpec(
                loss=objective,
                optimizer=optimizer,
                schedule=lambda _: jnp.float32(1e-2),
                key=jax.random.key(1),
                precision=built.precision,
                guard=GuardConfig(),
                axes=blueprint.axes,
                shardings=built.gradients,
                microbatches=microbatches,
            )
        )
        params = jax.jit(blueprint.init, out_shardings=built.shardings)(jax.random.key(0))
        put = functools.partial(host.put, grid)
        first, *_ = data = [put(batch) for batch in batches()]
        gradient = {}
        if differentiated:
            gradient = jax.jit(jax.grad(lambda p: objective(p, first, None).value))(params)
        state, metrics = states.init_state(params, optimizer, GuardConfig()), []
        step = jax.jit(step)
        for batch in data:
            state, out = step(state, batch)
            metrics.append({k: float(v) for k, v in out.items() if k != "layers"})
    return metrics, tree.leaves(gradient), tree.leaves(state.params)


@functools.cache
def on_one_device(model, **rest):
    return trained(model, {"data": 1}, **rest)


def assert_same(expected, got):
    names = ("loss_nats", "grad_norm", "moe_loss", "moe_balance", "moe_z", "moe_dropped")
    for other, here in zip(expected[0], got[0], strict=True):
        for name in (*names, "moe_load_max"):
            assert here[name] == pytest.approx(other[name], rel=1e-5, abs=1e-7), name
    for path, leaf in expected[1].items():
        size = float(jnp.abs(leaf).max())
        np.testing.assert_allclose(got[1][path], leaf, atol=1e-5 * size, rtol=1e-5, err_msg=path)
    for path, leaf in expected[2].items():
        if path.endswith("mlp/bias"):
            np.testing.assert_array_equal(got[2][path], leaf)


SLOW = [
    {"expert": 2},
    {"expert": 4},
    {"expert": 4, "tensor": 2},
    {"expert": 2, "fsdp": 2},
    {"expert": 2, "data": 2},
    {"expert": 2, "tensor": 2},
    {"expert": 2, "context": 2},
    {"expert": 2, "fsdp": 2, "tensor": 2},
    {"expert": 2, "context": 2, "tensor": 2},
    {"data": 8},
]


@pytest.mark.slow
def test_an_expert_axis_changes_no_loss():
    assert_same(on_one_device(DROPLESS), trained(DROPLESS, {"expert": 4}))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SLOW, ids=str)
@pytest.mark.parametrize("model", [DROPLESS, CAPACITY], ids=["dropless", "capacity"])
def test_a_mesh_with_an_expert_axis_changes_no_loss_and_no_gradient(model, sizes):
    expected = on_one_device(model, differentiated=True)
    assert_same(expected, trained(model, sizes, differentiated=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (CAPACITY, {"pipe": 2, "expert": 2}),
        (DROPLESS, {"pipe": 2, "expert": 2, "tensor": 2}),
        (CAPACITY, {"pipe": 2, "fsdp": 2, "expert": 2}),
        (CAPACITY, {"data": 1}),
    ],
    ids=lambda value: "" if isinstance(value, Mixtral) else str(value),
)
def test_nor_do_micro_batches_in_a_pipeline_or_one_after_another(model, sizes):
    assert_same(on_one_device(model), trained(model, sizes, microbatches=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "optim", [Muon(newton_schulz_dtype="float32"), Lion()], ids=["muon", "lion"]
)
def test_each_expert_is_a_matrix_of_its_own_to_the_optimizer(optim):
    assert_same(
        trained(CAPACITY, {"data": 1}, optim=optim), trained(CAPACITY, {"expert": 4}, optim=optim)
    )


@pytest.mark.slow
def test_a_bias_moves_by_one_step_against_the_load():
    _, _, params = on_one_device(CAPACITY)
    steps = np.asarray(params["stack/0/mlp/bias"]) / CAPACITY.balance_bias
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-5)
    assert 1 <= np.abs(steps).max().round() <= COUNT


def refused(model, **sizes):
    run = Run(model=model, mesh=MeshConfig(**{"data": 1} | sizes), train=TrainConfig(batch=8))
    with pytest.raises(ConfigError) as caught:
        setup.check_fit(run, mesh.build(run.mesh, jax.devices()[:4]))
    assert caught.value.code == 2
    return caught.value


def test_experts_that_do_not_divide_are_refused_with_meshes_that_fit():
    error = refused(dataclasses.replace(DROPLESS, experts=6), expert=4)
    assert "experts = 6 does not divide by 4" in error.why
    assert "--config.mesh.expert=2" in error.fix


def test_more_experts_a_token_than_there_are_is_refused_with_as_many_as_there_are():
    ((path, why, fix),) = dataclasses.replace(DROPLESS, top_k=5).problems()
    assert (path, fix) == ("top_k", "--config.model.top_k=4")
    assert "top_k = 5 of experts = 4" in why


EXPERTS = (
    *("--config.model.family=mixtral", "--config.model.width=32", "--config.model.depth=2"),
    *("--config.model.heads=2", "--config.model.kv_heads=2", "--config.model.hidden=32"),
    *("--config.model.experts=4", "--config.model.router_z=1e-3"),
    *("--config.model.balance_bias=1e-3", "--config.optim.lr=1e-2"),
    *("--config.mesh.data=1", "--config.mesh.expert=4", "--config.mesh.fsdp=2"),
)


@pytest.mark.slow
def test_dropped_tokens_are_said_once_in_the_log_and_stand_in_the_report(tmp_path):
    config = harness.write_config(tmp_path)
    out = tmp_path / "out"
    flags = (*EXPERTS, "--config.model.capacity=0.5", "--config.train.steps=4")
    assert main(harness.words(config, out, *flags)) == 0
    dropped = [r["moe_dropped"] for r in harness.records(out) if r["split"] == "train"]
    assert len(dropped) == 4
    assert min(dropped) > 0.2
    assert max(dropped) < 2 * dropped[0]
    (warning,) = harness.records(out, "warnings.jsonl")
    assert warning["step"] == 1
    assert f"experts dropped {dropped[0]:.2%} of the tokens routed to them" in warning["text"]
    assert warning["text"] in (out / "log.txt").read_text()
    report = (out / "report.html").read_text()
    assert f"{dropped[-1]:.3%}</td>" in report
    assert f"{np.mean(dropped):.3%}</td>" in report
    assert "choices dropped, the experts being full" in report


def test_a_share_that_grows_is_told_again_at_twice_the_last():
    notes = []
    dropping = DroppedTokenWarning(lambda text, step: notes.append(step))
    for step, share in enumerate((0.0, 0.01, 0.015, 0.021, 0.03, 0.05, float("nan"))):
        dropping.check(step, {"moe_dropped": share, "moe_load_max": 2.0})
    dropping.check(9, {"loss_nats": 1.0})
    assert notes == [1, 3, 5]


@pytest.mark.slow
def test_a_run_with_experts_writes_their_loads(tmp_path):
    config = harness.write_config(tmp_path)
    out = tmp_path / "out"
    assert main(harness.words(config, out, *EXPERTS)) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["split"] == "train"]
    assert lines[-1]["loss_nats"] < lines[0]["loss_nats"] - 0.5
    for line in lines:
        assert 1 <= line["moe_load_max"] <= 4
        assert line["moe_balance"] >= 0.9
        assert line["moe_z"] > 0 == line["moe_dropped"]
