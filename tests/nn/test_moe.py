"""The mixture of experts, against float64 numpy that goes token by token and expert by expert."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlm.core import tree
from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.nn.config import MoeConfig
from jaxlm.nn.moe import Moe
from tests.nn.reference import arrays, gated_silu, linear, moved

ROWS, LENGTH, WIDTH = 2, 10, 6
SOFTMAX = MoeConfig(experts=5, top_k=2, hidden=7, balance=0.3, router_z=0.05)
KINDS = {
    "softmax": SOFTMAX,
    "one expert a token": dataclasses.replace(SOFTMAX, top_k=1, normalize_top_k=False),
    "sigmoid, shared, scaled, biased": dataclasses.replace(
        SOFTMAX, router="sigmoid", shared=4, scale=2.5, bias_rate=0.5
    ),
    "groups": dataclasses.replace(SOFTMAX, experts=6, groups=3, top_groups=2),
    "groups of a sigmoid, biased": dataclasses.replace(
        SOFTMAX, experts=6, groups=2, top_groups=1, router="sigmoid", bias_rate=0.0
    ),
    "all experts": dataclasses.replace(SOFTMAX, top_k=5),
    "capacity": dataclasses.replace(SOFTMAX, capacity=0.6),
    "capacity, one expert, shared": dataclasses.replace(
        SOFTMAX, top_k=1, capacity=0.5, shared=4, router="sigmoid"
    ),
}
COUNTED = np.ones((ROWS, LENGTH))
COUNTED[1, 6:] = 0


def built(config):
    return moved(lambda key, init: Moe(WIDTH, config, key=key, init=init))


def reference(x, params, config):
    """Outputs and means; what is dropped is decided token after token."""
    logits = linear(x, params["router"])
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    scores = exp / exp.sum(-1, keepdims=True)
    if config.router == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    bias = params["bias"] if config.bias_rate is not None else np.zeros(config.experts)
    places = math.inf
    if config.capacity is not None:
        places = math.ceil(config.capacity * LENGTH * config.top_k / config.experts)
    out = np.zeros(x.shape)
    total = dict(moe_balance=0.0, moe_z=0.0, moe_load_max=0.0, moe_dropped=0.0)
    for row in range(ROWS):
        taken, chosen = np.zeros(config.experts), np.zeros(config.experts)
        mean = np.zeros(config.experts)
        for t in range(LENGTH):
            counts = COUNTED[row, t] > 0
            s = scores[row, t]
            ranked = s + bias
            groups = np.sort(ranked.reshape(config.groups, -1), axis=1)
            counted = 1 if config.router == "softmax" else 2
            order = np.argsort(-groups[:, -counted:].sum(1))[: config.top_groups]
            size = config.experts // config.groups
            allowed = [e for e in range(config.experts) if e // size in order]
            best = sorted(allowed, key=lambda e: -ranked[e])[: config.top_k]
            shares = {e: s[e] for e in best}
            whole = sum(shares.values()) if config.normalize_top_k else 1.0
            for e in best:
                chosen[e] += counts
                if config.capacity is not None and (not counts or taken[e] >= places):
                    total["moe_dropped"] += counts / (COUNTED.sum() * config.top_k)
                    continue
                taken[e] += 1
                weights = {n: {"weight": params[n]["weight"][e]} for n in ("gate", "up", "down")}
                out[row, t] += config.scale * shares[e] / whole * gated_silu(x[row, t], weights)
            if counts:
                mean += s / s.sum()
                total["moe_z"] += np.log(np.exp(logits[row, t]).sum()) ** 2 / COUNTED.sum()
        size = COUNTED[row].sum()
        load = chosen / (config.top_k * size)
        part = size / COUNTED.sum()
        total["moe_balance"] += part * config.experts * (load * mean / size).sum()
        total["moe_load_max"] += part * config.experts * load.max()
    if config.shared:
        out = out + gated_silu(x, params["shared"])
    return out, total


def objective(out, means, config, cotangent):
    added = config.balance * means["moe_balance"] + config.router_z * means["moe_z"]
    return (out * cotangent).sum() + COUNTED.sum() * added


@pytest.mark.few(2)
@pytest.mark.parametrize("name", KINDS)
def test_outputs_means_and_gradients_are_those_of_numpy(name):
    config = KINDS[name]
    moe, params = built(config)
    graphdef, state = nnx.split(moe)
    random = np.random.default_rng(0)
    x, cotangent = random.normal(size=(2, ROWS, LENGTH, WIDTH))

    def loss(state, x):
        y, means = nnx.merge(graphdef, state)(x, jnp.asarray(COUNTED, jnp.float32))
        return (y * cotangent).sum() + means["moe_loss"].total, (y, means)

    step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (value, (y, means)), (grads, x_grad) = step(state, jnp.asarray(x, jnp.float32))
    expected, totals = reference(x, params, config)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    for key, total in totals.items():
        np.testing.assert_allclose(means[key].value, total, rtol=1e-5, err_msg=key)
    np.testing.assert_allclose(value, objective(expected, totals, config, cotangent), rtol=1e-4)
    assert (totals["moe_dropped"] > 0) == (config.capacity is not None)

    flat, structure = jax.tree.flatten(params)
    moves = [random.normal(size=leaf.shape) for leaf in flat]
    paths = list(tree.leaves(params))
    gradients = tree.leaves(nnx.to_pure_dict(grads))
    for index, path in enumerate(paths):
        if path == "bias":  # its gradient is no slope: see the test below
            continue
        slope = 0.0
        for sign in (1, -1):
            leaves = [leaf + sign * 1e-6 * moves[i] * (i == index) for i, leaf in enumerate(flat)]
            moved = reference(x, jax.tree.unflatten(structure, leaves), config)
            # The count of choices of an expert is not differentiable, and does not move here.
            slope += sign * objective(*moved, config, cotangent) / 2e-6
        np.testing.assert_allclose(
            (np.asarray(gradients[path], np.float64) * moves[index]).sum(),
            slope,
            rtol=2e-4,
            atol=2e-4,
            err_msg=path,
        )
    move = random.normal(size=x.shape)
    ends = [
        objective(*reference(x + s * 1e-6 * move, params, config), config, cotangent)
        for s in (1, -1)
    ]
    np.testing.assert_allclose(
        (x_grad * move).sum(), (ends[0] - ends[1]) / 2e-6, rtol=2e-4, atol=2e-4
    )


@pytest.mark.slow
def test_the_gradient_of_the_bias_says_which_experts_are_chosen_too_often():
    config = dataclasses.replace(SOFTMAX, bias_rate=0.01)
    moe, _ = built(config)
    moe.bias[...] = jnp.asarray([0.3, 0, 0, 0, -3])
    graphdef, state = nnx.split(moe)
    x = jax.random.normal(jax.random.key(0), (ROWS, LENGTH, WIDTH))

    def loss(state):
        return nnx.merge(graphdef, state)(x, jnp.asarray(COUNTED, jnp.float32))[1]["moe_loss"].total

    gradient = np.asarray(jax.grad(loss)(state)["bias"][...])
    assert gradient[0] > 0 > gradient[4]
    assert abs(gradient).max() < 1e-6
    assert gradient.sum() == 0


def test_an_expert_takes_earlier_tokens_first():
    """The result of a token does not depend on those after it."""
    moe, _ = built(KINDS["capacity"])
    x = jax.random.normal(jax.random.key(0), (ROWS, LENGTH, WIDTH))
    changed = x.at[:, 5:].multiply(-3.0)
    run = jax.jit(lambda x: moe(x, jnp.ones((ROWS, LENGTH)))[0])
    np.testing.assert_array_equal(run(x)[:, :5], run(changed)[:, :5])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["softmax", "capacity, one expert, shared"])
def test_where_activations_are_bfloat16_so_is_their_gradient(name, monkeypatch):
    """The gradient has the dtype of a GPU or TPU; the router multiplies in float32."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    precision = Precision.of(PrecisionConfig(compute="bfloat16"))
    moe, _ = moved(
        lambda key, init: Moe(WIDTH, KINDS[name], key=key, init=init), precision=precision
    )
    graphdef, state = nnx.split(moe)
    x = jnp.zeros((ROWS, LENGTH, WIDTH), precision.activations)

    def loss(state, x):
        y, means = nnx.merge(graphdef, state)(x, jnp.asarray(COUNTED, jnp.float32))
        assert y.dtype == jnp.bfloat16
        return y.astype(jnp.float32).sum() + means["moe_loss"].total

    params, out = jax.eval_shape(jax.grad(loss, (0, 1)), state, x)
    assert out.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


def test_in_decoding_nothing_is_dropped():
    moe, _ = built(KINDS["capacity"])
    whole, _ = built(dataclasses.replace(KINDS["capacity"], capacity=None))
    x, ones = jax.random.normal(jax.random.key(0), (ROWS, LENGTH, WIDTH)), jnp.ones((ROWS, LENGTH))
    y, means = moe(x, ones, is_whole=False)
    np.testing.assert_array_equal(y, whole(x, ones)[0])
    assert float(means["moe_dropped"].total) == 0.0


@pytest.mark.few(1)
@pytest.mark.parametrize("top_k", [0, 6])
def test_a_token_cannot_see_more_experts_than_there_are(top_k):
    with pytest.raises(ValueError, match=f"top_k = {top_k} of experts = 5"):
        dataclasses.replace(SOFTMAX, top_k=top_k)


def test_the_weights_of_experts_name_their_axes():
    moe, _ = built(KINDS["softmax"])
    names = {
        "/".join(map(str, path)): variable.get_metadata()["logical_axes"]
        for path, variable in nnx.to_flat_state(nnx.state(moe))
    }
    assert names == {
        "router/weight": ("embed", "routes"),
        "gate/weight": ("experts", "embed", "mlp"),
        "up/weight": ("experts", "embed", "mlp"),
        "down/weight": ("experts", "mlp", "embed"),
    }
    assert arrays(moe)["gate"]["weight"].shape == (5, WIDTH, 7)
