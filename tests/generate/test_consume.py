import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import config
from jaxlm.generate import decode
from jaxlm.generate.consume import consume
from jaxlm.monitor import host_machine
from jaxlm.parallel import mesh
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan.serving import forecast_serving
from tests.models.parameters import draw_params

SMALL = {"model.vocab": 320, "model.width": 64, "model.depth": 4, "model.hidden": 128}
QUANTIZED = {"tune.name": "quantized", "tune.block": 32, "model.dropout": 0.0}


def size_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


SLOW = pytest.mark.slow


@pytest.fixture
def live_bytes(monkeypatch):
    """The bytes of all arrays, when each part exists and nothing of it is deleted."""
    seen, wait = [], jax.block_until_ready

    def ready(arrays):
        wait(arrays)
        seen.append(size_of([each for each in jax.live_arrays() if not each.is_deleted()]))
        return arrays

    monkeypatch.setattr(jax, "block_until_ready", ready)
    return seen


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(
    "settings",
    [
        {"precision.compute": "bfloat16"},
        pytest.param({"precision.compute": "float32", "model.tied": "true"}, marks=SLOW),
        pytest.param(QUANTIZED | {"tune.base": "nf4"}, marks=SLOW),
        QUANTIZED | {"tune.base": "w8a8", "tune.block": "all"},
    ],
    ids=["bfloat16", "float32", "nf4", "w8a8"],
)
def test_weights_are_made_in_parts_within_the_memory_of_the_plan(settings, live_bytes):
    named = [(name, str(value)) for name, value in (SMALL | settings).items()]
    run = config.load(Run, None, named).value
    blueprint = setup.build_sharded_model(run, 320, mesh.build(run.mesh)).blueprint
    relayout, _ = decode.weight_layout(blueprint.merge)

    def weights(params):
        return jax.tree.leaves(relayout(params))

    params = draw_params(blueprint)
    expected = [np.array(each) for each in jax.jit(weights)(params)]
    gc.collect()
    others = size_of(jax.live_arrays()) - size_of(params)
    made = consume(weights, params)
    for one, other in zip(made, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), other)
    assert len(live_bytes) > 3
    plan = forecast_serving(run, host_machine.this_machine(1, []), slots=1)
    assert 0.6 * plan.start_bytes < max(live_bytes) - others < 1.02 * plan.start_bytes


def test_a_result_of_two_parameters_keeps_neither_and_a_parameter_that_is_a_result_stays():
    params = {"a": jnp.ones((4, 4)), "b": jnp.full((4, 4), 2.0), "c": jnp.arange(3.0)}
    params["unread"] = jnp.ones(2)
    made = consume(lambda p: [p["a"] @ p["b"], p["c"], p["a"].T, jnp.zeros(2)], params)
    assert [each.is_deleted() for each in params.values()] == [True, True, False, True]
    assert made[1] is params["c"]
    np.testing.assert_array_equal(made[0], np.full((4, 4), 8.0))
    np.testing.assert_array_equal(made[3], np.zeros(2))


def test_what_another_model_has_too_is_kept():
    params = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}
    made = consume(lambda p: [2 * p["a"], 3 * p["b"]], params, [params["b"]])
    assert [each.is_deleted() for each in params.values()] == [True, False]
    np.testing.assert_array_equal(made[1], np.full((4, 4), 3.0))
