"""Runs with rollouts that SIGKILL ends several times: the same bits as a run that is never ended.

Samples, rewards, losses and parameters are compared. Each run is a command; one of its kills comes
from outside, while a step that is known from its records is over.
"""

import json
import os
import signal
import time

import pytest

from tests.faults import harness
from tests.recipes.train.test_rollouts import SETTINGS, records

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]

STEPS = 8
BASE = {
    "data.validation": ("10%",),
    "model.dropout": 0.0,
    "optim.lr": 1e-2,
    "train.steps": 150,
    "train.batch": 16,
    "checkpoint.every": "100%",
}
MODES = {
    "lag": {"rl.lag": 1, "reward.functions": ("length:2",)},
    "redraw": {"objective.dead_groups": "redraw", "rl.max_tokens": 2, "rl.updates": 1},
    "turns": {
        "data.tokenizer": "bytes",
        "data.sequence": 96,
        "rl.turns": 2,
        "rl.tool": "calculator",
        "rl.max_tokens": 40,
        **{f"model.{name}": size for name, size in {"width": 32, "depth": 2, "hidden": 64}.items()},
        **{"model.heads": 4, "model.kv_heads": 2, "optim.lr": 1e-4},
    },
}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = (json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) for n in range(30))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A run that has learned to call the calculator, with an expression that may be wrong."""
    folder = tmp_path_factory.mktemp("caller")
    config = harness.write_config(folder, BASE | {"data.sequence": 64})
    for n in range(80):
        text = f"{n % 30}+1=<calculator>{n % 30}+1</calculator>"
        (folder / f"{n:03d}.txt").write_text(text)
    code, output = harness.run(harness.words(config, folder / "run"))
    assert code == 0, output
    return folder / "run"


def kill_after(step, command, workdir):
    """Start a new process and kill it as soon as its records have a step."""
    process = harness.start(command, is_new=True)
    try:
        until = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < until:
            if any(each["step"] >= step for each in harness.records(workdir)):
                break
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        (output,) = harness.outputs_of([process])
    assert process.returncode == -signal.SIGKILL, output


@pytest.mark.parametrize("mode", MODES)
def test_kills_change_no_bit_of_a_run_with_rollouts(mode, prompts, tmp_path, request):
    settings = SETTINGS | {"data.train": (str(prompts),), "train.steps": STEPS} | MODES[mode]
    if mode == "turns":
        rewards = tmp_path / "rewards.py"
        rewards.write_text("def short(tokens):\n    return -tokens\n")
        settings |= {"reward.functions": (f"{rewards}:short",)}
    config = harness.write_config(tmp_path, settings)
    start = [f"--init_from={request.getfixturevalue('caller')}"] if mode == "turns" else []
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, output = harness.run(harness.words(config, whole, *start))
    assert code == 0, output
    words = harness.words(config, parts, *start)
    kill_after(2, words, parts)
    for fault in (
        "rollout.draw:sigkill@5",
        "rollout.score:sigkill",
        "save.files:sigkill@6",
        "step.after:sigkill@7",
    ):
        code, output = harness.run(words, fault)
        assert code == -signal.SIGKILL, (fault, output)
    code, output = harness.run(words)
    assert code == 0, output
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert records(parts, name) == records(whole, name), name
    assert harness.losses(parts) == harness.losses(whole)
    assert harness.state_digest(parts) == harness.state_digest(whole)
    steps = [each for each in records(whole) if each["split"] == "train"]
    assert any(each["grad_norm"] > 0 for each in steps)
    if mode == "redraw":
        assert sum(each["redrawn_groups"] for each in steps) > 0
    if mode == "turns":
        assert sum(each.get("tool_calls", 0) for each in steps) > 0
        texts = [each["text"] for each in records(whole, "rollouts.jsonl")]
        assert any(text.partition("</calculator>")[2] for text in texts)


def test_a_kill_after_a_rewind_into_a_rollout_changes_no_bit_of_a_run_with_a_lag(prompts, tmp_path):
    """The run continues with the second batch of rollout 3; those ahead of it are drawn then."""
    settings = SETTINGS | MODES["lag"] | {"data.train": (str(prompts),), "train.steps": STEPS}
    settings |= {"rl.lag": 2, "rl.updates": 1, "rl.epochs": 2, "reward.functions": ("length:3",)}
    settings |= {"guard.budget": 2, "guard.skip": 3, "guard.rewind_steps": 2}
    config = harness.write_config(tmp_path, settings | {"checkpoint.keep_last": 9})
    bad = "batch:nan@5-6"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, output = harness.run(harness.words(config, whole), bad)
    assert code == 0, output
    (rewind,) = json.loads((whole / "rewinds.json").read_text())
    assert (rewind["to"], rewind["low"], rewind["high"]) == (4, 4, 7)
    words = harness.words(config, parts)
    for fault in ("rewind:sigkill", "step.after:sigkill@6", "save.files:sigkill@7"):
        code, output = harness.run(words, f"{bad},{fault}")
        assert code == -signal.SIGKILL, (fault, output)
    code, output = harness.run(words, bad)
    assert code == 0, output
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert records(parts, name) == records(whole, name), name
    assert harness.state_digest(parts) == harness.state_digest(whole)
