"""Every metric of every layer against NumPy, on several meshes and with micro-batches."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.config import DecoderConfig
from jaxlm.nn.config import AttentionConfig, BlockConfig, MlpConfig, MoeConfig, NormConfig
from jaxlm.nn.intermediates import capture
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.loss import token_nll
from jaxlm.optim import build as optimizers
from jaxlm.optim import schedules
from jaxlm.optim.config import AdamW
from jaxlm.optim.schedule_config import Constant
from jaxlm.parallel import host, mesh, rules
from jaxlm.parallel.config import MeshConfig
from jaxlm.training import observe
from jaxlm.training import state as states
from jaxlm.training import step as steps
from jaxlm.training.step import StepSpec
from tests.models.parameters import draw_params
from tests.nn import reference
from tests.training.test_step import GUARD, batches

CLOSE = dict(rtol=2e-4, atol=1e-6)
FULL = BlockConfig(
    attention=AttentionConfig(heads=4, kv_heads=2, head_dim=4),
    mlp=MlpConfig(hidden=16, activation="relu", gated=True),
    norm=NormConfig(),
)
NEAR = dataclasses.replace(
    FULL,
    attention=dataclasses.replace(FULL.attention, window=3, softcap=2.0),
    mlp=MlpConfig(hidden=12, activation="relu", gated=False),
)
EXPERTS = dataclasses.replace(FULL, mlp=MoeConfig(experts=4, top_k=2, hidden=8))
# Layers 0 to 4: one before the pattern, two kinds by turns under the scan, and one left over.
MODEL = DecoderConfig(
    vocab=64, width=16, depth=6, prefix=(EXPERTS,), pattern=(NEAR, FULL), final_norm=NormConfig()
)
LAYERS = (EXPERTS, NEAR, FULL, NEAR, FULL, NEAR)
EVERYTHING = ("norms", "activations", "attention", "noise")


@dataclasses.dataclass
class Pieces:
    blueprint: Blueprint
    optimizer: object
    loss: object
    rate: object

    def observer(self, kinds=EVERYTHING, **options):
        return observe.build_observer(
            StepSpec(
                loss=self.loss,
                optimizer=self.optimizer,
                schedule=self.rate,
                guard=GUARD,
                key=jax.random.key(1),
                precision=Precision.float32(),
                axes=self.blueprint.axes,
                **options,
            ),
            watched=kinds,
        )

    def fresh(self):
        """A state whose weights are large enough for figures that differ."""
        return states.init_state(draw_params(self.blueprint, std=0.12), self.optimizer, GUARD)


@pytest.fixture(scope="module")
def pieces():
    blueprint = Blueprint(MODEL, Precision.float32())
    rate = schedules.build(Constant(), lr=1e-2, total=20, tokens_per_step=1)
    optimizer = optimizers.build(AdamW(lr=1e-2), rate, blueprint.axes)

    def loss(params, batch, key):
        return token_nll(blueprint.merge(params), batch, key, LossConfig())

    return Pieces(blueprint, optimizer, loss, rate)


@pytest.fixture(scope="module")
def batch():
    return next(batches(1))


@pytest.fixture(scope="module")
def state(pieces):
    return jax.jit(pieces.fresh)()


@pytest.fixture(scope="module")
def noted(pieces, state, batch):
    """Metrics of the forward pass alone."""

    def forward(params, batch):
        with capture(("activations", "entropy")) as notes:
            pieces.loss(params, batch, None)
        return observe.Observed({}, notes, 0.0, 0.0)

    return observe.layer_metrics(jax.device_get(jax.jit(forward)(state.params, batch)))


@pytest.fixture(scope="module")
def record(pieces, state, batch):
    return observe.layer_metrics(jax.device_get(jax.jit(pieces.observer())(state, batch)))


def own(params, number):
    """The parameters of a layer, by its number among all."""
    stack, kind, place = (
        ("prefix", 0, 0) if number == 0 else ("stack", (number - 1) % 2, (number - 1) // 2)
    )
    return jax.tree.map(lambda x: np.asarray(x[place], np.float64), params[stack][str(kind)])


def rms(x, counted):
    return np.sqrt((x**2).mean(-1)[counted].mean())


def attended(x, params, config, segments, counted):
    """Attention in float64, and the maximum of its scores and their entropy by head.

    Args:
      x: the input.
      params: parameters of the layer's attention.
      config: settings of the attention.
      segments: documents of the tokens.
      counted: true for tokens that count.
    """
    query, key, value = (reference.linear(x, params[name]) for name in ("query", "key", "value"))
    out, peak, entropy = (
        np.zeros(query.shape),
        np.full(config.heads, -np.inf),
        np.zeros(config.heads),
    )
    for row, t, head in np.ndindex(query.shape[:3]):
        shared = head * config.kv_heads // config.heads
        first = 0 if config.window is None else max(0, t + 1 - config.window)
        seen = [s for s in range(first, t + 1) if segments[row, s] == segments[row, t]]
        scores = key[row, seen, shared] @ query[row, t, head] / np.sqrt(config.head_dim)
        if counted[row, t]:
            peak[head] = max(peak[head], scores.max())
        if config.softcap is not None:
            scores = config.softcap * np.tanh(scores / config.softcap)
        weights = np.exp(scores) / np.exp(scores).sum()
        out[row, t, head] = weights @ value[row, seen, shared]
        if counted[row, t]:
            entropy[head] -= (weights * np.log(weights)).sum()
    return reference.linear(out, params["out"], 2), peak, entropy / counted.sum()


def fed(x, params, config, counted):
    """The feed-forward part in float64, with figures of its units or experts."""
    if isinstance(config, MoeConfig):
        logits = reference.linear(x, params["router"])
        shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        chosen = np.argsort(-shares, axis=-1, kind="stable")[..., : config.top_k]
        mask = np.zeros_like(shares)
        np.put_along_axis(mask, chosen, 1, -1)
        shares = shares * mask / (shares * mask).sum(-1, keepdims=True)
        gate, up = (np.einsum("btd,edf->btef", x, params[n]["weight"]) for n in ("gate", "up"))
        hidden = gate / (1 + np.exp(-gate)) * up
        out = np.einsum("btef,efd,bte->btd", hidden, params["down"]["weight"], shares)
        load = mask[counted].sum(0)
        return out, {f"expert_load/{e}": load[e] / load.mean() for e in range(config.experts)}
    up = reference.linear(x, params["up"])
    gate = reference.linear(x, params["gate"]) if config.gated else up
    hidden = np.maximum(gate, 0) * (up if config.gated else 1)
    return reference.linear(hidden, params["down"]), {"dead_units": (gate <= 0).all((0, 1)).mean()}


def test_what_layers_note_is_what_numpy_finds(noted, state, batch):
    counted = np.asarray(batch.segments) > 0
    x = np.asarray(state.params["embedding"]["table"], np.float64)[batch.tokens]
    for number, config in enumerate(LAYERS):
        params = own(state.params, number)
        read = reference.norm(x, params["attention_norm"], config.norm)
        added, peak, entropy = attended(
            read, params["attention"], config.attention, np.asarray(batch.segments), counted
        )
        x = x + added
        expected = {
            "attention_out_rms": rms(added, counted),
            "attention_logit_max": peak.max(),
            "attention_entropy": entropy.mean(),
            "attention_entropy_min": entropy.min(),
        }
        read = reference.norm(x, params["mlp_norm"], config.norm)
        added, more = fed(read, params["mlp"], config.mlp, counted)
        x = x + added
        expected |= more | {"mlp_out_rms": rms(added, counted), "stream_rms": rms(x, counted)}
        for name, value in expected.items():
            np.testing.assert_allclose(
                noted[f"layers/{number}/{name}"], value, **CLOSE, err_msg=f"{name} of {number}"
            )
        kinds = {name.split("/")[-1] for name in noted if name.startswith(f"layers/{number}/")}
        assert {name.split("/")[-1] for name in expected} <= kinds
    assert len({noted[f"layers/{i}/stream_rms"] for i in range(6)}) == 6
    assert not any(name.startswith("layers/6/") for name in noted)


@pytest.mark.slow
def test_norms_are_those_of_the_gradient_and_of_what_a_step_moves(pieces, record, state, batch):
    key = jax.random.fold_in(jax.random.key(1), 0)
    grads = jax.jit(jax.grad(lambda p: pieces.loss(p, batch, key).value))(state.params)
    step = steps.build_step(
        StepSpec(
            loss=pieces.loss,
            optimizer=pieces.optimizer,
            schedule=pieces.rate,
            key=jax.random.key(1),
            precision=Precision.float32(),
            guard=GUARD,
        )
    )
    after, _ = jax.jit(step)(state, batch)
    moved = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, after.params, state.params)
    trees = {"grad_norm": grads, "param_norm": state.params, "update_norm": moved}
    for name, values in trees.items():
        for number in range(6):
            leaves = tree.leaves(own(values, number))
            sizes = {path: np.sqrt((leaf**2).sum()) for path, leaf in leaves.items()}
            for path, size in sizes.items():
                logged = record[f"layers/{number}/{path}/{name}"]
                np.testing.assert_allclose(logged, size, rtol=1e-3, err_msg=f"{name} of {path}")
            whole = np.sqrt(sum(size**2 for size in sizes.values()))
            np.testing.assert_allclose(record[f"layers/{number}/{name}"], whole, rtol=1e-3)
        table = np.linalg.norm(np.asarray(values["embedding"]["table"], np.float64))
        np.testing.assert_allclose(record[f"layers/embedding/table/{name}"], table, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "microbatches"),
    [({}, 4), ({"fsdp": 2, "tensor": 2}, 1), ({"fsdp": 2, "expert": 2}, 2)],
    ids=str,
)
def test_figures_are_those_of_one_device_and_one_batch(
    pieces, record, state, batch, sizes, microbatches
):
    grid = mesh.build(MeshConfig(data=1, **sizes), jax.devices()[: 4 if sizes else 1])
    layout = rules.shardings(grid, pieces.blueprint.axes, pieces.blueprint.shapes)
    observer = pieces.observer(shardings=layout, microbatches=microbatches)
    with jax.set_mesh(grid):
        rest = jax.device_put(jax.device_get(state), states.replicated(grid))
        placed = rest._replace(params=jax.device_put(state.params, layout))
        observed = jax.jit(observer)(placed, host.put(grid, batch))
    metrics = observe.layer_metrics(jax.device_get(observed))
    assert metrics.keys() == record.keys()
    for name, value in record.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-3, atol=1e-5, err_msg=name)


def test_nothing_is_noted_where_nobody_asks(pieces, state, batch):
    observed = jax.eval_shape(pieces.observer(("norms",)), state, batch)
    assert not observed.notes.sums
    assert not observed.notes.peaks
