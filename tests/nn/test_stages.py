"""Layers in a pipeline compute the function of the plain loop, for each schedule and remat."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlm.core import tree
from jaxlm.nn.attention import LayerInputs
from jaxlm.nn.cache import LayerCache
from jaxlm.nn.init import Initializer
from jaxlm.nn.stack import Stack, StackSpec
from jaxlm.ops import masks
from jaxlm.parallel.schedule import Schedule
from tests.nn.reference import FLOAT32
from tests.nn.test_stack import DROPPING, KEY, LENGTH, PLAIN, WIDTH, assert_same

ROWS = 4
KINDS = (PLAIN, dataclasses.replace(PLAIN, residual="post"))
SEGMENTS = jnp.asarray([[1, 1, 1, 2, 2, 0], [1] * 6, [1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 0, 0]])
POSITIONS = jnp.asarray([[0, 1, 2, 0, 1, 0], [*range(6)], [0, *range(5)], [*range(4), 0, 0]])


def made(schedule, *, depth=4, pattern=(PLAIN,), layers="scan", remat="none"):
    return Stack(
        StackSpec(WIDTH, depth, pattern),
        key=jax.random.key(0),
        init=Initializer("normal", 0.3, depth, FLOAT32),
        layers=layers,
        remat=remat,
        schedule=schedule,
    )


def run(stack, x=None, *, key=None):
    x = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, WIDTH)) if x is None else x
    mask = masks.causal(LENGTH, SEGMENTS[: len(x)])
    return stack(x, LayerInputs(POSITIONS[: len(x)], mask), key=key)[0]


def loss_and_gradients(stack):
    graphdef, state = nnx.split(stack)
    loss = lambda state: jnp.square(run(nnx.merge(graphdef, state))).sum()  # noqa: E731
    value, gradients = jax.jit(jax.value_and_grad(loss))(state)
    return value, tree.leaves(nnx.to_pure_dict(gradients))


@pytest.fixture(scope="module")
def plain():
    return loss_and_gradients(made(None))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (Schedule(2, 4), {}),
        (Schedule(2, 2, 2), {"remat": "full"}),
        pytest.param(Schedule(4, 1), {}, marks=pytest.mark.slow),
        pytest.param(Schedule(4, 4), {"layers": "unroll", "remat": "full"}, marks=pytest.mark.slow),
        pytest.param(Schedule(2, 2), {"remat": "dots"}, marks=pytest.mark.slow),
        pytest.param(Schedule(2, 2, 2), {"remat": "save:mlp_out"}, marks=pytest.mark.slow),
        pytest.param(Schedule(2, 4, 2), {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_pipeline_is_the_plain_loop_with_packed_rows(plain, schedule, options):
    assert_same(plain, loss_and_gradients(made(schedule, **options)))


@pytest.mark.slow
def test_a_pattern_of_two_kinds_repeats_within_each_stage():
    plain, piped = (made(plan, depth=8, pattern=KINDS) for plan in (None, Schedule(2, 2, 2)))
    np.testing.assert_allclose(run(piped), run(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_each_micro_batch_drops_its_own_and_the_same_again():
    stack = made(Schedule(2, 2), pattern=(DROPPING,))
    same = jnp.broadcast_to(jax.random.normal(KEY, (LENGTH, WIDTH)), (2, LENGTH, WIDTH))
    dropped = jax.jit(lambda key: stack(
        same,
        LayerInputs(jnp.zeros((2, LENGTH), jnp.int32), masks.causal(LENGTH)),
        key=key,
    )[0])  # fmt: skip
    first = dropped(KEY)
    np.testing.assert_array_equal(first, dropped(KEY))
    assert float(jnp.abs(first[0] - first[1]).max()) > 0.1
    assert float(jnp.abs(first - dropped(jax.random.split(KEY)[0])).max()) > 0.1


@pytest.mark.slow
def test_an_evaluation_of_other_rows_runs_without_a_pipeline_where_it_must():
    x = jax.random.normal(jax.random.key(1), (3, LENGTH, WIDTH))
    plain, piped = (run(made(plan), x) for plan in (None, Schedule(2, 2, 2)))
    np.testing.assert_array_equal(piped, plain)


def test_caches_are_written_without_a_pipeline():
    cache = LayerCache.empty(ROWS, LENGTH, (1, 4, 4), jnp.dtype(jnp.float32), None)
    x = np.random.default_rng(1).standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32)
    start = np.zeros((ROWS,), np.int32)

    @nnx.jit
    def written(stack):
        inputs = LayerInputs(POSITIONS, masks.causal(LENGTH), start=start)
        return stack(x, inputs, caches={"0": (cache,) * 4})[:2]

    outs = [written(made(plan)) for plan in (None, Schedule(2, 4))]
    jax.tree.map(np.testing.assert_array_equal, *outs)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [Schedule(2, 4), Schedule(2, 4, 2)], ids=str)
def test_a_pipeline_that_computes_again_keeps_less(schedule):
    def kept(remat):
        graphdef, state = nnx.split(made(schedule, remat=remat))
        loss = lambda s: jnp.square(run(nnx.merge(graphdef, s))).sum()  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(state).compile().memory_analysis().temp_size_in_bytes

    none, dots, full = map(kept, ("none", "dots", "full"))
    assert full < dots < none
