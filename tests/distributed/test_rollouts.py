"""Rollouts of two processes: the samples, rewards and losses of one."""

import json

import pytest

from tests.distributed.test_processes import train
from tests.faults import harness
from tests.recipes.train.test_rollouts import SETTINGS, records

pytestmark = pytest.mark.slow


def write_config(tmp_path, settings):
    """A config of prompts whose mesh has two devices."""
    prompts = tmp_path / "prompts.jsonl"
    lines = (json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) for n in range(30))
    prompts.write_text("".join(f"{line}\n" for line in lines))
    settings = SETTINGS | {"data.train": (str(prompts),), "mesh.data": 2} | settings
    return harness.write_config(tmp_path, settings)


def compare(tmp_path, settings, stops, samples):
    """Train in one process and in two, which also stop and resume; return all samples of one."""
    config = write_config(tmp_path, settings)
    one, two = tmp_path / "one", tmp_path / "two"
    train(1, 2, harness.words(config, one))
    for more in (*([f"--stop_at={stop}"] for stop in stops), []):
        train(2, 1, harness.words(config, two, *more))
    drawn = [records(each, "rollouts.jsonl") for each in (one, two)]
    assert len(drawn[0]) == samples
    for name in ("step", "digest", "text", "reward", "reason"):
        assert [each[name] for each in drawn[0]] == [each[name] for each in drawn[1]], name
    for mine, theirs in zip(records(one), records(two), strict=True):
        assert mine["loss_nats"] == pytest.approx(theirs["loss_nats"], abs=1e-5)
        for name in ("reward", "turns", "tool_calls", "tool_failures"):
            assert mine.get(name) == pytest.approx(theirs.get(name)), name
    return drawn[0]


def test_two_processes_draw_and_learn_as_one_does(tmp_path):
    """With rollouts that are drawn ahead; the second half is of two processes that resume."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def shape(tokens):\n    return -abs(tokens - 3)\n")
    settings = {"reward.functions": (f"{rewards}:shape",), "rl.lag": 1, "rl.slots": 8}
    compare(tmp_path, settings, (3,), 2 * 16)


def test_two_processes_have_the_turns_of_one(tmp_path):
    """The first process calls the tool, and both read its texts; some samples have one turn."""
    rewards, tool = tmp_path / "rewards.py", tmp_path / "tools.py"
    rewards.write_text("def short(tokens):\n    return -tokens\n")
    tool.write_text("def more(completion):\n    return '1+1=' if len(completion) % 2 else None\n")
    settings = {
        "reward.functions": (f"{rewards}:short",),
        "rl.tool": f"{tool}:more",
        "rl.turns": 2,
        "rl.max_tokens": 4,
        "rl.slots": 8,
        "data.sequence": 24,
    }
    texts = [each["text"] for each in compare(tmp_path, settings, (1,), 2 * 16)]
    assert 0 < sum("1+1=" in text for text in texts) < len(texts)


def test_two_processes_that_resume_count_the_rollouts_without_a_gradient_before_them(tmp_path):
    """Two before the stop and one after it end the run, as three in a row do in one process."""
    never = {"reward.functions": ("exact",), "rl.updates": 1, "guard.budget": 3, "train.steps": 6}
    config = write_config(tmp_path, never)
    one, two = tmp_path / "one", tmp_path / "two"
    train(1, 2, harness.words(config, one), code=79)
    train(2, 1, harness.words(config, two, "--stop_at=2"))
    output = train(2, 1, harness.words(config, two), code=79)
    assert "equal rewards in 3 rollouts in a row" in output
    drawn = [records(each, "rollouts.jsonl") for each in (one, two)]
    assert len(drawn[0]) == 3 * 8
    assert [each["digest"] for each in drawn[0]] == [each["digest"] for each in drawn[1]]
