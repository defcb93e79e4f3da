"""muP: what a step does to a model is the same at every width; and frozen parameters in a step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.config import MupConfig
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.mistral import Mixtral
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.loss import token_nll
from jaxlm.optim import build as optimizers
from jaxlm.optim import groups
from jaxlm.optim.config import AdamW, Muon
from jaxlm.recipes.config import Run
from jaxlm.training import gradient
from jaxlm.training import state as states
from jaxlm.training import step as steps
from jaxlm.training.gradient import GradientSpec
from jaxlm.training.step import StepSpec
from tests.training.test_step import GUARD, batches

KEY = jax.random.key(0, impl="rbg")  # quick to compile
BASE, WIDTHS, STEPS = 32, (32, 64, 128, 256), 4


def family(width):
    return Llama(
        vocab=64, width=width, depth=2, heads=width // 16, kv_heads=width // 16, hidden=2 * width,
        init_std=BASE**-0.5,
    )  # fmt: skip


def coordinates(width, mup):
    """Root mean squares of the change of the stream and the logits of a batch in a few steps."""
    blueprint = Blueprint(mup.applied(family(width).build()), Precision.float32())
    config = AdamW(lr=0.02, clip_norm=None, weight_decay=0.0)
    optimizer = optimizers.build(
        config,
        lambda _: jnp.float32(config.lr),
        blueprint.axes,
        width_ratio=blueprint.config.width_ratio,
    )

    def loss(params, batch, key):
        return token_nll(blueprint.merge(params), batch, None, LossConfig())

    step = jax.jit(
        steps.build_step(
            StepSpec(
                loss=loss,
                optimizer=optimizer,
                schedule=lambda _: jnp.float32(config.lr),
                key=jax.random.key(1),
                precision=Precision.float32(),
                guard=GUARD,
            )
        )
    )
    (batch,) = batches(1)

    @jax.jit
    def seen(params):
        model = blueprint.merge(params)
        hidden = model.hidden(batch.tokens, positions=batch.positions, segments=batch.segments)
        return hidden.values, model.logits(hidden.values)

    @jax.jit
    def fresh():
        return states.init_state(blueprint.init(jax.random.key(0)), optimizer, GUARD)

    state = fresh()
    before = seen(state.params)
    for _ in range(STEPS):
        state, _ = step(state, batch)
    return [
        float(jnp.sqrt(jnp.mean((a - b) ** 2)))
        for a, b in zip(seen(state.params), before, strict=True)
    ]


@pytest.mark.slow
def test_what_moves_is_as_large_at_every_width_and_grows_without(record_property):
    """The coordinate check: the slope of the logarithm of what moves over that of the width."""
    slopes = {}
    for name, mup in (("muP", MupConfig(base_width=BASE)), ("standard", MupConfig())):
        moved = np.array([coordinates(width, mup) for width in WIDTHS])
        slopes[name] = np.polyfit(np.log(WIDTHS), np.log(moved), 1)[0]
        text = "; ".join(f"{w}: {a:.3f} {b:.3f}" for w, (a, b) in zip(WIDTHS, moved, strict=True))
        record_property("table", f"{name}: width: stream, logits moved  {text}")
    stream, logits = slopes["muP"]
    assert abs(stream) < 0.05, slopes
    # The part of the unembedding's random weights falls with the root of the width, and the learned
    # part stays.
    assert -0.5 < logits < 0.1, slopes
    assert slopes["standard"][1] > 0.5, slopes


def test_at_the_base_width_nothing_changes_and_beyond_it_weights_and_logits_do():
    plain, wide = family(64).build(), MupConfig(base_width=16).applied(family(64).build())
    assert (
        Blueprint(MupConfig(base_width=64).applied(plain), Precision.float32()).config.width_ratio
        == 1
    )
    assert MupConfig().applied(plain) == plain
    key = KEY
    before, after = (
        tree.leaves(jax.jit(Blueprint(config, Precision.float32()).init)(key))
        for config in (plain, wide)
    )
    for path, weight in before.items():
        ratio = 0.5 if path.startswith("stack/") and path.endswith("weight") else 1.0
        np.testing.assert_allclose(after[path], ratio * weight, rtol=1e-6, err_msg=path)
    hidden = jnp.ones((1, 1, 64))
    logits = [
        Blueprint(config, Precision.float32()).merge(_nested(before)).logits(hidden)
        for config in (plain, wide)
    ]
    np.testing.assert_allclose(logits[1], logits[0] / 4, rtol=1e-6)
    small = MupConfig(base_width=16, base_head_dim=4).applied(plain)
    assert small.pattern[0].attention.scale == pytest.approx(4**0.5 / 16)


def _nested(leaves):
    out = {}
    for path, leaf in leaves.items():
        *stem, last = path.split("/")
        functools.reduce(lambda node, name: node.setdefault(name, {}), stem, out)[last] = leaf
    return out


def test_a_router_ends_outside_of_the_width():
    sizes = dict(vocab=64, width=16, depth=1, heads=2, kv_heads=2, hidden=8, experts=4, top_k=2)
    plain = Mixtral(**sizes).build()
    blueprints = (
        Blueprint(config, Precision.float32())
        for config in (plain, MupConfig(base_width=4).applied(plain))
    )
    before, after = (
        jax.jit(lambda key, each=each: each.init(key)["stack"]["0"]["mlp"])(KEY)
        for each in blueprints
    )
    for name, ratio in (("router", 4), ("up", 2), ("down", 2)):
        np.testing.assert_allclose(after[name]["weight"] * ratio, before[name]["weight"], rtol=1e-5)


def test_an_optimizer_without_a_rule_for_widths_is_refused():
    run = Run(optim=Muon(), model=Llama(init="he"), mup=MupConfig(base_width=64))
    assert [path for path, _, _ in run.problems()] == ["optim.name", "model.init"]
    assert not list(Run(mup=MupConfig(base_width=64)).problems())


@pytest.mark.slow
def test_frozen_leaves_have_no_gradient_and_the_others_their_own():
    blueprint = Blueprint(family(32).build(), Precision.float32())
    params = jax.jit(blueprint.init)(KEY)
    held = groups.frozen(AdamW(freeze=("embedding/*", "*/attention/*")), blueprint.axes)

    def loss(params, batch, key):
        return token_nll(blueprint.merge(params), batch, None, LossConfig())

    (batch,) = batches(1)
    whole, part = (
        tree.leaves(
            jax.jit(
                gradient.build_gradient(
                    GradientSpec(loss=loss, precision=Precision.float32(), frozen=paths)
                )
            )(params, batch, jax.random.key(0), jnp.float32(1))[0]
        )
        for paths in (frozenset(), held)
    )
    assert set(part) == set(whole) - held
    assert len(held) == 5
    for path, grad in part.items():
        np.testing.assert_allclose(grad, whole[path], rtol=1e-4, atol=1e-7)
