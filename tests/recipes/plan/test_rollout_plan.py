"""The plan of rollouts: the cache of the sampler, and times that follow what is drawn."""

import jax
import pytest

from jaxlm.core import config
from jaxlm.monitor import host_machine
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import predict

pytestmark = pytest.mark.usefixtures("one_device")
SMALL = {
    **{
        "data.kind": "prompts",
        "data.sequence": 32,
        "data.validation": "20%",
        "data.train": "prompts.jsonl",
    },
    **{"model.vocab": 320, "model.width": 16, "model.depth": 2, "model.heads": 2},
    **{"model.kv_heads": 1, "model.hidden": 32, "train.batch": 16, "train.steps": 10},
    **{"objective.name": "policy", "rl.samples": 4, "rl.max_tokens": 8, "rl.slots": 4},
    "reward.functions": "ended",
}


def planned(**more):
    settings = SMALL | {name.replace("__", "."): value for name, value in more.items()}
    run = config.load(Run, None, [(name, str(value)) for name, value in settings.items()]).value
    return predict.forecast(run, host_machine.this_machine(1, []))


def test_the_cache_of_the_plan_is_that_of_the_sampler():
    plan = planned()
    model = setup.build_sharded_model(plan.run, 320, setup.build_mesh_for(plan.run)).blueprint
    merged = jax.eval_shape(lambda: model.merge(model.init(jax.random.key(0))).empty_cache(4, 32))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(merged.layers))
    assert plan.rollout.cache_bytes == held
    record = plan.record()["rollout"]
    assert (record["samples"], record["slots"]) == (16, 4)


def test_the_time_of_drawing_is_part_of_that_of_the_run():
    one, more = planned(), planned(rl__updates=4)
    assert one.rollout.seconds[0] < one.rollout.seconds[1]
    assert more.rollout.seconds[1] == pytest.approx(4 * one.rollout.seconds[1])
    steps = 10 * (one.seconds[1] + one.rollout.seconds[1]) / 3600
    assert one.record()["hours"][1] == pytest.approx(steps)
    assert more.record()["hours"] == pytest.approx(one.record()["hours"])
    assert planned(rl__lag=1).draw_bytes > one.draw_bytes + one.bytes_per_device["gradients"]
    text = planned(objective__name="policy").record()["rollout"]
    assert text["draw_seconds"][0] > 0
