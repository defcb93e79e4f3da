"""The loop over layers has one result, for each way to run it and each remat."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlm.core import tree
from jaxlm.nn.attention import LayerInputs
from jaxlm.nn.block import Block
from jaxlm.nn.cache import LayerCache
from jaxlm.nn.config import AttentionConfig, BlockConfig, MlpConfig, NormConfig
from jaxlm.nn.init import Initializer
from jaxlm.nn.rotary import Rope
from jaxlm.nn.stack import Stack, StackSpec
from jaxlm.ops import masks
from tests.nn.reference import FLOAT32

ROWS, LENGTH, WIDTH = 2, 6, 8
PLAIN = BlockConfig(
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=4, rotary=Rope()),
    mlp=MlpConfig(hidden=12, activation="silu", gated=True),
    norm=NormConfig(),
)
DROPPING = dataclasses.replace(
    PLAIN, dropout=0.3, attention=dataclasses.replace(PLAIN.attention, dropout=0.3)
)
PATTERNS = {
    "one kind": (2, (DROPPING,)),
    "two kinds and a layer over": (3, (DROPPING, dataclasses.replace(DROPPING, residual="post"))),
    "three kinds for two layers": (
        2,
        (DROPPING, dataclasses.replace(DROPPING, residual="parallel"), PLAIN),
    ),
}
# Threefry, the default, is most of the time that these programs take to compile.
KEY = jax.random.key(7, impl="rbg")


def made(depth, pattern, *, layers="scan", remat="none"):
    init = Initializer("normal", 0.3, depth, FLOAT32)
    key = jax.random.key(0)
    spec = StackSpec(WIDTH, depth, pattern)
    return Stack(spec, key=key, init=init, layers=layers, remat=remat)


X = np.random.default_rng(1).standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32)
POSITIONS = np.broadcast_to(np.arange(LENGTH, dtype=np.int32)[None], (ROWS, LENGTH))


def traced(stack, key=None):
    return stack(X, LayerInputs(POSITIONS, masks.causal(LENGTH)), key=key)[0]


run = nnx.jit(traced)


def loss_and_gradients(stack):
    graphdef, state = nnx.split(stack)

    def loss(state):
        return jnp.square(traced(nnx.merge(graphdef, state), key=KEY)).sum()

    loss, gradients = jax.jit(jax.value_and_grad(loss))(state)
    return loss, tree.leaves(nnx.to_pure_dict(gradients))


def assert_same(one, other):
    (loss, gradients), (other_loss, other_gradients) = one, other
    np.testing.assert_allclose(loss, other_loss, rtol=1e-5)
    assert gradients.keys() == other_gradients.keys()
    for path, gradient in gradients.items():
        size = float(jnp.abs(gradient).max())
        assert size > 0, path
        np.testing.assert_allclose(
            gradient, other_gradients[path], rtol=1e-4, atol=1e-5 * size, err_msg=path
        )


@pytest.fixture(scope="module", params=PATTERNS)
def pattern(request):
    return PATTERNS[request.param]


@pytest.fixture(scope="module")
def scanned(pattern):
    return loss_and_gradients(made(*pattern))


@pytest.mark.slow
@pytest.mark.few(1)
def test_scan_and_unroll_drop_the_same_with_the_same_key(pattern, scanned):
    assert_same(scanned, loss_and_gradients(made(*pattern, layers="unroll")))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("depth", "layers", "remat"),
    [
        (2, "scan", "dots"),
        (2, "scan", "full"),
        (2, "scan", "save:mlp_out"),
        (2, "scan", "save:attention_out,mlp_out"),
        (2, "unroll", "dots"),
        (2, "unroll", "full"),
        (3, "scan", "full/none"),  # a turn, and a layer over
        (2, "unroll", "full/dots"),
    ],
)
def test_what_is_computed_again_drops_the_same(depth, layers, remat):
    plain, repeated = (
        loss_and_gradients(made(depth, (DROPPING,), layers=layers, remat=policy))
        for policy in ("none", remat)
    )
    assert_same(plain, repeated)


def dots(program):
    """Count the matrix products of a program; layers of a kind are calls of one program."""
    return sum(
        (eqn.primitive.name == "dot_general")
        + sum(dots(each) for each in jax.tree.leaves(eqn.params, is_leaf=is_program))
        for eqn in getattr(program, "eqns", ())
    )


def is_program(value):
    return hasattr(value, "eqns")


def test_remat_computes_again_what_its_policy_does_not_keep():
    def products(remat):
        """Matrix products of the backward pass of one layer, by its program."""
        graphdef, state = nnx.split(made(1, (PLAIN,), layers="unroll", remat=remat))
        return dots(jax.make_jaxpr(jax.grad(lambda s: traced(nnx.merge(graphdef, s)).sum()))(state))

    counts = {remat: products(remat) for remat in ("none", "dots", "save:mlp_out", "full")}
    # Projections alone are kept by "dots": the two products of attention have a batch and are made
    # again.
    assert counts["dots"] == counts["none"] + 2
    # The last product of a layer is not needed to go back through it, and is dead code to both.
    assert counts["full"] >= counts["save:mlp_out"] > counts["dots"]


@pytest.mark.few(1)
@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_of_several_policies_layers_take_turns(layers):
    def products(remat):
        graphdef, state = nnx.split(made(4, (PLAIN,), layers=layers, remat=remat))
        return dots(jax.make_jaxpr(jax.grad(lambda s: traced(nnx.merge(graphdef, s)).sum()))(state))

    none, half, full = (products(remat) for remat in ("none/none", "full/none", "full/full"))
    # In an unrolled stack the last product of the last layer is dead code, whichever its policy.
    assert none < half < full
    assert abs((full - half) - (half - none)) <= 1


@pytest.mark.slow
def test_turns_of_kinds_and_policies_that_do_not_divide_the_depth_change_nothing():
    _, kinds = PATTERNS["two kinds and a layer over"]
    plain, turns = (
        loss_and_gradients(made(7, kinds, remat=policy)) for policy in ("none", "full/none/dots")
    )
    assert_same(plain, turns)


@pytest.mark.slow
def test_without_a_key_nothing_is_dropped(pattern):
    depth, kinds = pattern
    still = tuple(
        dataclasses.replace(
            kind, dropout=0.0, attention=dataclasses.replace(kind.attention, dropout=0.0)
        )
        for kind in kinds
    )
    out, without = run(made(depth, kinds)), run(made(depth, still))
    np.testing.assert_array_equal(out, without)
    np.testing.assert_array_equal(run(made(depth, still), key=KEY), without)
    dropped = run(made(depth, kinds), key=KEY)
    assert float(jnp.abs(dropped - out).max()) > 0.1
    assert (
        float(jnp.abs(dropped - run(made(depth, kinds), key=jax.random.split(KEY)[0])).max()) > 0.1
    )


def test_a_layer_draws_by_its_place_and_not_by_the_pattern():
    """Four layers of one kind are two repeats of two: the same weights, and the same dropout."""
    one, two = made(4, (DROPPING,)), made(4, (DROPPING, DROPPING))
    np.testing.assert_allclose(run(one, key=KEY), run(two, key=KEY), rtol=1e-5, atol=1e-5)


@pytest.mark.few(1)
def test_layers_are_run_in_the_order_of_the_pattern(pattern):
    depth, kinds = pattern
    stack = made(depth, kinds)

    @nnx.jit
    def one_by_one(stack):
        x = X
        for index in range(depth):
            kind, repeat = index % len(kinds), index // len(kinds)
            graphdef, state = nnx.split(getattr(stack, str(kind)))
            block = nnx.merge(graphdef, jax.tree.map(lambda leaf, r=repeat: leaf[r], state))
            assert isinstance(block, Block)
            assert block.config == kinds[kind]
            x, _, _ = block(x, LayerInputs(POSITIONS, masks.causal(LENGTH)))
        return x

    np.testing.assert_allclose(run(stack), one_by_one(stack), rtol=1e-5, atol=1e-5)


def test_a_kind_that_is_never_reached_has_no_parameters():
    stack = made(*PATTERNS["three kinds for two layers"])
    leaves = tree.leaves(nnx.to_pure_dict(nnx.state(stack)))
    assert {path.split("/")[0] for path in leaves} == {"0", "1"}
    assert {leaf.shape[0] for leaf in leaves.values()} == {1}


def test_no_two_layers_start_with_the_same_weights():
    leaves = tree.leaves(nnx.to_pure_dict(nnx.state(made(4, (PLAIN, PLAIN)))))
    names = {path.partition("/")[2] for path in leaves if path.endswith("weight")}
    assert len(names) == 7
    for name in names:
        weights = np.concatenate((leaves[f"0/{name}"], leaves[f"1/{name}"]))
        assert len(np.unique(weights)) == weights.size, name


def test_a_cache_comes_back_in_its_own_shape_with_every_layer_written(pattern):
    depth, kinds = pattern
    stack = made(depth, kinds)
    empty = LayerCache.empty(ROWS, LENGTH, (1, 4, 4), jnp.dtype(jnp.float32), None)
    caches = {
        str(kind): (empty,) * len(range(kind, depth, len(kinds)))
        for kind in range(min(depth, len(kinds)))
    }
    inputs = LayerInputs(POSITIONS, masks.causal(LENGTH), start=np.zeros((ROWS,), np.int32))
    out, written, _ = nnx.jit(lambda stack, caches: stack(X, inputs, caches=caches))(stack, caches)
    np.testing.assert_allclose(out, run(stack), rtol=1e-5, atol=1e-5)
    assert jax.tree.map(jnp.shape, written) == jax.tree.map(jnp.shape, caches)
    assert all(bool((leaf != 0).all()) for leaf in jax.tree.leaves(written))


def test_layers_of_a_kind_are_traced_once(monkeypatch):
    stack, traces = made(4, (PLAIN,), layers="unroll"), []
    call = Block.__call__

    def counted(*inputs, **more):
        traces.append(0)
        return call(*inputs, **more)

    monkeypatch.setattr(Block, "__call__", counted)
    jax.eval_shape(traced, stack)
    assert len(traces) == 1
    empty = LayerCache.empty(ROWS, LENGTH, (1, 4, 4), jnp.dtype(jnp.float32), None)
    inputs = LayerInputs(POSITIONS, masks.causal(LENGTH), start=np.zeros((ROWS,), np.int32))
    jax.eval_shape(lambda stack: stack(X, inputs, caches={"0": (empty,) * 4})[0], stack)
    assert len(traces) == 2


@pytest.mark.slow
def test_going_back_keeps_no_copy_of_the_weights():
    """They are arguments already. Few tokens, so that nothing else of the size is kept."""
    graphdef, state = nnx.split(made(16, (PLAIN,)))
    program = jax.make_jaxpr(jax.grad(lambda s: traced(nnx.merge(graphdef, s)).sum()))(state)
    (forward, _) = (each for each in program.eqns if each.primitive.name == "scan")
    weights = {leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim > 2}
    assert weights
    assert not weights & {out.aval.shape for out in forward.outvars}
