"""Every wiring of the residual stream against its formula, written out in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.nn.attention import LayerInputs
from jaxlm.nn.block import Block
from jaxlm.nn.config import REMAT_NAMES, AttentionConfig, BlockConfig, MlpConfig, NormConfig
from jaxlm.ops import masks
from tests.nn import reference

ROWS, LENGTH, WIDTH = 2, 7, 12
NORMS = {
    "rms": NormConfig(kind="rms", eps=1e-5),
    "layer": NormConfig(kind="layer", eps=1e-3, bias=True),
}
CONFIG = BlockConfig(
    attention=AttentionConfig(heads=4, kv_heads=2, head_dim=4, bias=True),
    mlp=MlpConfig(hidden=20, activation="silu", gated=True, bias=True),
    norm=NORMS["rms"],
)


def pre(x, f, g, n):
    x = x + f(n("attention_norm", x))
    return x + g(n("mlp_norm", x))


def post(x, f, g, n):
    x = n("attention_norm", x + f(x))
    return n("mlp_norm", x + g(x))


def sandwich(x, f, g, n):
    x = x + n("attention_out_norm", f(n("attention_norm", x)))
    return x + n("mlp_out_norm", g(n("mlp_norm", x)))


def parallel(x, f, g, n):
    read = n("attention_norm", x)
    return x + f(read) + g(read)


def parallel_norms(x, f, g, n):
    return x + f(n("attention_norm", x)) + g(n("mlp_norm", x))


def output(x, f, g, n):
    x = x + n("attention_out_norm", f(x))
    return x + n("mlp_out_norm", g(x))


FORMULAS = (pre, post, sandwich, parallel, parallel_norms, output)
WIRINGS = {formula.__name__: formula for formula in FORMULAS}


def made(**changes):
    config = dataclasses.replace(CONFIG, **changes)
    return reference.moved(lambda key, init: Block(WIDTH, config, key=key, init=init))


def run(block, x, key=None):
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], x.shape[:2])
    return block(x, LayerInputs(positions, masks.causal(LENGTH)), key=key)[0]


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(2), (ROWS, LENGTH, WIDTH))


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("residual", WIRINGS)
def test_every_wiring_is_its_formula(residual, kind, x):
    block, params = made(residual=residual, norm=NORMS[kind])
    read = set()

    def norm(name, x):
        read.add(name)
        return reference.norm(x, params[name], NORMS[kind])

    expected = WIRINGS[residual](
        np.asarray(x, np.float64),
        lambda x: reference.attention(x, params["attention"], CONFIG.attention, None),
        lambda x: reference.gated_silu(x, params["mlp"]),
        norm,
    )
    np.testing.assert_allclose(run(block, x), expected, rtol=1e-5, atol=1e-5)
    assert {name for name in params if name.endswith("norm")} == read, "a norm that nothing reads"


@pytest.mark.few(2)
@pytest.mark.parametrize("residual", WIRINGS)
def test_what_each_part_adds_has_the_name_by_which_remat_keeps_it(residual, x):
    block, _ = made(residual=residual)
    program = jax.make_jaxpr(lambda x: run(block, x))(x)
    named = [eqn.params["name"] for eqn in program.eqns if eqn.primitive.name == "name"]
    assert sorted(named) == sorted(REMAT_NAMES)


@pytest.mark.few(1)
@pytest.mark.parametrize("residual", ["pre", "sandwich", "parallel"])
def test_what_each_part_adds_is_dropped_at_the_rate_and_apart(residual, x):
    block, _ = made(residual=residual, dropout=0.25)
    keys = jax.random.split(jax.random.key(3), 400)
    drawn = jax.jit(jax.vmap(lambda key: run(block, x, key)))(keys)
    # A channel that lost what both parts add is as it came in.
    assert abs(float((drawn == x[None]).mean()) - 0.25**2) < 0.005


@pytest.mark.few(2)
@pytest.mark.parametrize("residual", WIRINGS)
def test_nothing_is_dropped_without_a_key(residual, x):
    block, _ = made(
        residual=residual,
        dropout=0.5,
        attention=dataclasses.replace(CONFIG.attention, dropout=0.5),
    )
    still, _ = made(residual=residual)
    np.testing.assert_array_equal(run(block, x), run(still, x))
    assert float(jnp.abs(run(block, x, jax.random.key(0)) - run(still, x)).max()) > 0.1
