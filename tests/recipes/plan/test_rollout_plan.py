"""The plan of rollouts: the cache of the sampler, and times that follow what is drawn."""

import dataclasses
import functools

import jax
import pytest

from jaxlm.core import config
from jaxlm.monitor import host_machine
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import predict
from jaxlm.rl.config import prompt_rows

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


# Depth, width, heads, hidden, vocabulary; samples, tokens of a row, new ones; the seconds of the
# processor that scripts/bench_plan_rollouts.py measured: draw, score again, train (scripts/LOG.md).
MEASURED = {
    "1M": ((4, 128, 4, 384, 320), (64, 512, 256), (1.824, None, 2.951)),
    "4M": ((4, 256, 4, 768, 1024), (32, 256, 64), (0.393, 0.482, 1.279)),
    "12M": ((6, 384, 6, 1024, 4096), (64, 128, 64), (1.524, None, 3.603)),
}


@functools.cache
def cpu():
    """The CPU of `MEASURED`: speeds of this one depend on what else runs on it."""
    here = host_machine.this_machine(1, [])
    flops = dict.fromkeys(here.chip.flops, 228e9)
    chip = dataclasses.replace(here.chip, flops=flops, memory_speed=70e9)
    return dataclasses.replace(here, chip=chip)


def planned(**more):
    settings = SMALL | {name.replace("__", "."): value for name, value in more.items()}
    run = config.load(Run, None, [(name, str(value)) for name, value in settings.items()]).value
    return predict.forecast(run, cpu())


@pytest.mark.parametrize("size", MEASURED)
def test_the_middle_of_the_plan_of_a_cpu_is_within_a_fifth_of_what_was_measured(size):
    (depth, width, heads, hidden, vocab), (batch, sequence, new), measured = MEASURED[size]
    plan = planned(
        **{"model__depth": depth, "model__width": width, "model__heads": heads},
        **{"model__kv_heads": heads, "model__hidden": hidden, "model__vocab": vocab},
        **{"train__batch": batch, "data__sequence": sequence, "rl__max_tokens": new},
        **{"rl__samples": 8, "rl__slots": "auto", "loss__chunk": 2048, "train__microbatches": 4},
        rl__correction="none" if measured[1] is None else "tis",
    )
    assert not any("took twice" in each for each in plan.assumed)
    spans = plan.rollout.draw_seconds, plan.rollout.rescore_seconds, plan.seconds
    for (low, high), seconds in zip(spans, measured, strict=True):
        if seconds is not None:
            assert low <= high
            assert (low * high) ** 0.5 == pytest.approx(seconds, rel=0.2)


def test_the_cache_of_the_plan_is_that_of_the_sampler():
    plan = planned()
    model = setup.build_sharded_model(plan.run, 320, setup.build_mesh_for(plan.run)).blueprint
    merged = jax.eval_shape(lambda: model.merge(model.init(jax.random.key(0))).empty_cache(4, 32))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(merged.layers))
    assert plan.rollout.cache_bytes == held
    record = plan.record()["rollout"]
    assert (record["samples"], record["slots"]) == (16, 4)


def test_a_model_below_the_measured_sizes_has_a_note():
    assert any("took twice" in each for each in planned(model__vocab=512).assumed)


def test_the_time_of_drawing_is_part_of_that_of_the_run():
    one, more = planned(), planned(rl__updates=4)
    assert one.rollout.seconds[0] < one.rollout.seconds[1]
    assert more.rollout.seconds[1] == pytest.approx(4 * one.rollout.seconds[1], rel=0.05)
    steps = 10 * (one.seconds[1] + one.rollout.seconds[1]) / 3600
    assert one.record()["hours"][1] == pytest.approx(steps)
    assert more.record()["hours"] == pytest.approx(one.record()["hours"], rel=0.05)
    assert planned(rl__lag=1).draw_bytes > one.draw_bytes + one.bytes_per_device["gradients"]
    text = planned(objective__name="policy").record()["rollout"]
    assert text["draw_seconds"][0] > 0


def test_a_prompt_is_read_once_for_its_samples_and_has_logits_of_its_last_token():
    """Long prompts: their samples are a tenth of a row."""
    long = {"data__sequence": 320, "rl__max_tokens": 32, "rl__slots": 16}
    long |= {"model__width": 256, "model__hidden": 1024}
    one, alone = planned(**long, rl__samples=8), planned(**long, rl__samples=2)
    assert one.rollout.draw_seconds[1] < 0.8 * alone.rollout.draw_seconds[1]
    assert prompt_rows(16, 4) == 5
    assert prompt_rows(4, 4) == 2
    assert prompt_rows(1, 4) == 1
    text = planned(**long, objective__name="causal", data__kind="text")
    head = 6 * 320 * 256
    assert text.flops_per_token - one.flops_per_token == pytest.approx(0.9 * head)


def test_scores_of_the_trained_program_are_part_of_a_rollout():
    plain, ppo, corrected = planned(), planned(objective__name="ppo"), planned(rl__correction="tis")
    assert plain.rollout.rescore_seconds == (0, 0)
    for each in (ppo, corrected):
        low, high = each.rollout.rescore_seconds
        assert 0 < low < high
        assert high < each.seconds[1]
        assert each.rollout.seconds[1] == each.rollout.draw_seconds[1] + high
        assert each.record()["rollout"]["rescore_seconds"] == [low, high]
