"""Rollouts of two processes: the samples, rewards and losses of one."""

import json

import pytest

from tests.distributed.test_processes import train
from tests.faults import harness
from tests.recipes.test_policy import SETTINGS, records


@pytest.mark.slow
def test_two_processes_draw_and_learn_as_one_does(tmp_path):
    """With rollouts that are drawn ahead; the second half is of two processes that resume."""
    prompts, rewards = tmp_path / "prompts.jsonl", tmp_path / "rewards.py"
    lines = (json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) for n in range(30))
    prompts.write_text("".join(f"{line}\n" for line in lines))
    rewards.write_text("def shape(tokens):\n    return -abs(tokens - 3)\n")
    settings = SETTINGS | {
        "data.train": (str(prompts),),
        "reward.functions": (f"{rewards}:shape",),
        "rl.lag": 1,
        "rl.slots": 8,
        "mesh.data": 2,
    }
    config = harness.write_config(tmp_path, settings)
    one, two = tmp_path / "one", tmp_path / "two"
    train(1, 2, harness.words(config, one))
    for more in (["--stop_at=3"], []):
        train(2, 1, harness.words(config, two, *more))
    drawn = [records(each, "rollouts.jsonl") for each in (one, two)]
    assert len(drawn[0]) == 2 * 16
    for name in ("step", "digest", "reward", "reason"):
        assert [each[name] for each in drawn[0]] == [each[name] for each in drawn[1]], name
    for mine, theirs in zip(records(one), records(two), strict=True):
        assert mine["loss_nats"] == pytest.approx(theirs["loss_nats"], abs=1e-5)
        assert mine.get("reward") == pytest.approx(theirs.get("reward"))
